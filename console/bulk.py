"""Bulk actions: the list of all, which is their audit log, and the page of one, with its progress.

Only operators may start, stop and continue an action. Readers see neither reasons and names nor what operators have
searched for in the words of errors.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.bulk_threads import look_for_bulk_actions
from api.ledger_calls import call_ledger
from console import bulk_form
from console.answers import changed
from console.bulk_form import ACTS, HOME
from console.bulk_words import SHADES, WORDS, Words
from console.door import PREFIX
from console.pages import render
from console.task_search import Name, parse
from console.visitors import READERS, Visitor, require_form, require_visitor
from models.bulk_actions import BulkState
from models.clock import now
from models.engine import engine
from models.errors import Misuse
from tasks.operations import bulk_actions
from tasks.operations.bulk_actions import LOST_SECONDS, BulkRow, UnknownBulkAction
from tasks.operations.listing import Cursor

PAGE: Final = 50  # actions
REFRESH_SECONDS: Final = 1
REFRESH_ENDED_SECONDS: Final = 10
HIDDEN: Final = "…"


@dataclass(frozen=True, slots=True)
class Shown:
    """An action as the pages show it to a visitor."""

    row: BulkRow
    words: Words
    state: str
    shade: str
    query: str
    path: str

    @property
    def left(self) -> timedelta | None:
        """Return how long it still takes at its rate."""
        row = self.row
        if row.state != BulkState.RUNNING or row.per_second is None or row.wanted is None:
            return None
        return timedelta(seconds=max(0, row.wanted - row.changed) / row.per_second)

    @property
    def unchanged(self) -> int:
        """Return how many tasks it has left as they were, although they matched when they were counted."""
        is_over = self.row.state == BulkState.DONE and self.row.wanted is not None
        return max(0, (self.row.wanted or 0) - self.row.changed) if is_over else 0


async def show_list(request: Request) -> Response:
    """Show all actions, the latest first."""
    visitor = await require_visitor(request, *READERS)
    given = request.query_params.get("before")
    before = Cursor.parse(given) if given else None

    def read() -> tuple[datetime, list[BulkRow]]:
        with engine().connect() as connection:
            return now(connection), bulk_actions.list_actions(connection, before=before, limit=PAGE + 1)

    at, rows = await call_ledger(read)
    older = f"{HOME}?{urlencode({'before': str(rows[PAGE - 1].cursor)})}" if len(rows) > PAGE else None
    shown = [_shown(row, visitor) for row in rows[:PAGE]]
    values = {"page": "tasks", "at": at, "rows": shown, "newer": HOME if before else None, "older": older}
    return render(request, "bulk/list.html", values)


async def show(request: Request) -> Response:
    """Show one action: how far it has come, its canaries, and some of its tasks."""
    visitor = await require_visitor(request, *READERS)
    id_ = _id(request)

    def read() -> tuple[datetime, BulkRow]:
        with engine().connect() as connection:
            return now(connection), bulk_actions.read(connection, id_)

    at, row = await call_ledger(read)
    shown = _shown(row, visitor)
    values = {
        "page": "tasks",
        "at": at,
        "each": shown,
        "refresh": REFRESH_SECONDS if row.can_stop else REFRESH_ENDED_SECONDS,
        "lost_seconds": LOST_SECONDS,
        "tasks": f"{PREFIX}/tasks?{urlencode({'q': shown.query})}" if HIDDEN not in shown.query else None,
    }
    return render(request, "bulk/action.html", values)


async def stop(request: Request) -> Response:
    """Stop an action after the batch that is being written."""
    return await _change(request, bulk_actions.stop, "The action is stopped; it changes nothing more.")


async def go_on(request: Request) -> Response:
    """Continue an action that was stopped."""
    answer = await _change(request, bulk_actions.go_on, "The action goes on where it has stopped.")
    look_for_bulk_actions()
    return answer


async def _change(request: Request, change: Callable[..., None], said: str) -> Response:
    visitor, _ = await require_form(request, ACTS)
    id_ = _id(request)

    def act() -> str:
        change(engine(), id_, actor=visitor.actor)
        return said

    return await changed(request, act, back=f"{HOME}/{id_}")


def _shown(row: BulkRow, visitor: Visitor) -> Shown:
    state = "lost" if row.is_lost else row.state
    shade = "dead" if row.is_lost else SHADES[BulkState(row.state)]
    query = row.query if visitor.can_operate else _without_words(row.query)
    return Shown(row, WORDS[row.verb], state, shade, query, f"{HOME}/{row.id}")


def _without_words(query: str) -> str:
    """Return a query without the words of an error, which readers do not see elsewhere either."""
    try:
        terms = parse(query)
    except Misuse:
        return HIDDEN
    return str(terms.replacing(Name.TEXT, HIDDEN)) if terms.get(Name.TEXT) else query


def _id(request: Request) -> uuid.UUID:
    given = request.path_params["id"]
    try:
        return uuid.UUID(given)
    except ValueError:
        raise UnknownBulkAction(f"{given[:60]!r} is not the id of a bulk action.") from None


ROUTES: Final = [
    Route(HOME, show_list),
    Route(HOME, bulk_form.create, methods=["POST"]),
    Route(f"{HOME}/new", bulk_form.show_new),
    Route(f"{HOME}/{{id}}", show),
    Route(f"{HOME}/{{id}}/stop", stop, methods=["POST"]),
    Route(f"{HOME}/{{id}}/continue", go_on, methods=["POST"]),
]
