"""Turn templates into pages. Everything that a template shows is escaped, whatever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

import settings
from console import formats
from console.static_files import address_of

TEMPLATES: Final = Path(__file__).parent / "templates"

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
    "count": formats.count,
    "duration": formats.duration,
    "rate": formats.rate,
    "clock": formats.clock,
}
_environment.globals["asset"] = address_of


def render(
    request: Request,
    template: str,
    values: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Return a page. Its header says who is logged in, if a route has found out."""
    visitor = getattr(request.state, "visitor", None)
    text = render_part(template, {"visitor": visitor, "schema": _schema(), **values})
    return HTMLResponse(text, status_code=status, headers=headers)


def render_part(template: str, values: Mapping[str, Any]) -> str:
    """Return a part of a page."""
    return _environment.get_template(template).render(values)


def _schema() -> str:
    """Return the name of the installation. An error page must not fail because the settings are wrong."""
    try:
        return settings.current().ledger_schema
    except settings.SettingsError:
        return ""
