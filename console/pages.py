"""Turn templates into pages. Everything that a template shows is escaped, whatever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

import settings
from api.tokens import Scope
from console import formats
from console.answers import forget_said, read_said
from console.door import PREFIX
from console.static_files import address_of
from console.task_search import tasks_path
from console.visitors import READERS, Visitor

TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Entry:
    """A page in the navigation. Visitors without one of the scopes do not see it."""

    key: str
    title: str
    path: str
    scopes: tuple[Scope, ...] = READERS


NAVIGATION: Final = (
    Entry("overview", "Overview", PREFIX),
    Entry("tasks", "Tasks", f"{PREFIX}/tasks"),
    Entry("dead", "Dead letters", f"{PREFIX}/dead"),
    Entry("queues", "Queues", f"{PREFIX}/queues"),
    Entry("outbox", "Outbox", f"{PREFIX}/outbox"),
    Entry("sinks", "Sinks", f"{PREFIX}/sinks"),
    Entry("workers", "Workers", f"{PREFIX}/workers"),
    Entry("receipts", "Receipts", f"{PREFIX}/receipts"),
    Entry(
        "documents", "Documents", f"{PREFIX}/documents", (Scope.OPERATE, Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)
    ),
    Entry("workflows", "Workflows", f"{PREFIX}/workflows"),
)

_environment: Final = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_environment.filters |= {
    "number": formats.number,
    "size": formats.size,
    "count": formats.count,
    "duration": formats.duration,
    "rate": formats.rate,
    "clock": formats.clock,
    "moment": formats.moment,
    "distance": formats.distance,
    "as_json": formats.as_json,
    "with_code": formats.with_code,
}
_environment.globals |= {"asset": address_of, "tasks_path": tasks_path}


def render(
    request: Request,
    template: str,
    values: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Return a page. Its header says who is logged in, if a route has found out, and what the last form has done."""
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    said = read_said(request)
    frame = {"visitor": visitor, "schema": _schema(), "navigation": _navigation(visitor), "said": said}
    text = render_part(template, {**frame, **values})
    response = HTMLResponse(text, status_code=status, headers=headers)
    if said:
        forget_said(response, request)
    return response


def render_part(template: str, values: Mapping[str, Any]) -> str:
    """Return a part of a page."""
    return _environment.get_template(template).render(values)


def _navigation(visitor: Visitor | None) -> list[Entry]:
    return [entry for entry in NAVIGATION if visitor and visitor.token.has_scope(*entry.scopes)]


def _schema() -> str:
    """Return the name of the installation. An error page must not fail because the settings are wrong."""
    try:
        return settings.current().ledger_schema
    except settings.SettingsError:
        return ""
