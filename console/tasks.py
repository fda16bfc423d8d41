"""The list of tasks: a search in every state, page by page, whose address is its whole state.

    q             the search, as it was typed (`console/task_search.py`)
    order=oldest  the oldest change first
    before, after the place where a page begins

Only the first page is kept live; the others do not move while a person reads them. Bulk actions are links with the
search as it was understood, so that they mean the same tasks when the ledger has changed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.tokens import Forbidden, Token
from api.visible_errors import show_listed
from console.door import PREFIX
from console.pages import render
from console.task_search import (
    ABOUT_ERRORS,
    TASKS,
    Name,
    Query,
    Term,
    filter_of,
    only_id,
    parse,
    require_visible,
    understand,
)
from console.visitors import READERS, Visitor, require_visitor
from models.bulk_actions import BulkVerb
from models.clock import now
from models.engine import engine
from models.errors import Misuse
from models.status import TaskStatus
from tasks.operations.listing import Cursor, UnknownTask, status_of
from tasks.operations.task_search import CEILING, FoundTask, SearchPage, ids_with_key, known_types, search

PAGE: Final = 50  # tasks
REFRESH_SECONDS: Final = 3
REFRESH_LONG_SECONDS: Final = 15  # of a search that reads up to its ceiling
OLDEST: Final = "oldest"
UNDERSTOOD: Final = {
    Name.STATUS: "is a status",
    Name.TYPE: "is a type of task",
    Name.ID: "is the id of a task",
    Name.KEY: "is the idempotency key of a task",
    Name.TEXT: "is not a status, a type, an id or a key that the ledger has, so it is searched for in error messages",
}
ACTS: Final = {BulkVerb.REQUEUE: "Requeue", BulkVerb.RUN_NOW: "Run now", BulkVerb.DISCARD: "Discard"}
CHANGES: Final = {
    BulkVerb.REQUEUE: {TaskStatus.DEAD},
    BulkVerb.RUN_NOW: {TaskStatus.QUEUED, TaskStatus.RETRYING},
    BulkVerb.DISCARD: {TaskStatus.QUEUED, TaskStatus.RETRYING, TaskStatus.DEAD},
}
# Terms of the language: an example that works, and what it means.
HELP: Final = (
    ("status:dead,retrying", "One or more of queued, running, retrying, succeeded, dead and discarded."),
    ("type:document.ingest", "The type of the task."),
    ("queue:ingest", "The queue."),
    ("id:01902f5a-7c1e-7d3b-9c4a-5e6f70819203", "One or more ids, with commas."),
    ("key:order-4711", "The idempotency key. For a type that no worker has registered, name the type, too."),
    ("partition:customer-17", "The partition key."),
    ("error:timeout", "The code of the error that the task had last. Without status: only dead and retrying tasks."),
    ('text:"no such file"', "A part of its error message, in upper or lower case. For tokens that may operate."),
    ("fingerprint:9f86d081884c7d65", "The fingerprint of its error: a group of the dead letters."),
    ("since:2h until:30m", "The time of the last change: an age (90s, 30m, 2h, 3d) or a time (2026-11-16T10:30, UTC)."),
    ("type:document.ingest status:dead error:timeout since:1d", "All terms must be true, in any order."),
)


@dataclass(frozen=True, slots=True)
class View:
    """Which page of which search: what the address says."""

    text: str = ""
    oldest_first: bool = False
    before: Cursor | None = None
    after: Cursor | None = None

    @property
    def is_first(self) -> bool:
        return self.before is None and self.after is None

    @property
    def reads_up(self) -> bool:
        """Return whether the page is read from older to newer changes."""
        return self.after is not None or (self.oldest_first and self.before is None)

    def address(self, query: Query | None = None, **changes: object) -> str:
        """Return the address of the first page of this list, or of another one."""
        values = {"q": self.text if query is None else str(query), "order": OLDEST if self.oldest_first else ""}
        given = {name: str(value) for name, value in (values | changes).items() if value}
        return f"{TASKS}?{urlencode(given)}" if given else TASKS


@dataclass(frozen=True, slots=True)
class Link:
    """A link of the page. `kind` is what it is in its group: the current one, or a dangerous one."""

    text: str
    path: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A task, its error as far as the visitor may see it, and the searches for its type and its queue."""

    task: FoundTask
    error: str | None
    of_type: str
    of_queue: str


@dataclass(frozen=True, slots=True)
class Found:
    """What the ledger has found, and the query with a name for each of its words."""

    at: datetime
    query: Query
    page: SearchPage


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    text = request.query_params.get("q", "").strip()
    if id_ := only_id(text):
        return RedirectResponse(await call_ledger(partial(_address_of, id_, text)), status_code=303)
    try:
        view = _view(request, text)
        given = parse(text)
        require_visible(given, visitor.token)
        found = await call_ledger(partial(_find, given, view, visitor.token))
    except (Misuse, Forbidden) as refused:
        values = {"page": "tasks", "q": text, "complaint": refused.message, "help": _help(visitor)}
        return render(request, "tasks/refused.html", values, status=refused.http_status)
    return render(request, "tasks.html", {"page": "tasks", "q": text, **_shown(given, found, view, visitor)})


def _view(request: Request, text: str) -> View:
    given = request.query_params
    before, after = (Cursor.parse(given[name]) if given.get(name) else None for name in ("before", "after"))
    return View(text, given.get("order") == OLDEST, before, None if before else after)


def _address_of(id_: uuid.UUID, text: str) -> str:
    """Return the page of a task; or the search for a key, if there is no such task and a key looks like an id."""
    with engine().connect() as connection:
        try:
            status_of(connection, id_)
        except UnknownTask:
            if ids_with_key(connection, text, known_types(connection)):
                return View().address(Query((Term(Name.KEY, text),)))
    return f"{TASKS}/{id_}"


def _find(given: Query, view: View, token: Token) -> Found:
    with engine().connect() as connection:
        query = understand(connection, given)
        require_visible(query, token)
        at = now(connection)
        page = search(
            connection,
            filter_of(connection, query, at=at),
            before=view.before,
            after=view.after,
            oldest_first=view.oldest_first,
            limit=PAGE,
        )
    return Found(at, query, page)


def _shown(given: Query, found: Found, view: View, visitor: Visitor) -> dict[str, Any]:
    """Return what the template shows."""
    query, page = found.query, found.page
    named = next((new for old, new in zip(given.terms, query.terms, strict=True) if old.name is Name.PHRASE), None)
    seconds = REFRESH_LONG_SECONDS if page.is_cut else REFRESH_SECONDS
    is_further_up = view.reads_up
    return {
        "refresh": seconds if view.is_first else None,
        "now": found.at,
        "view": view,
        "is_all": not query.terms,
        "understood": named and (named.value, UNDERSTOOD[named.name], str(named)),
        "tabs": _tabs(query, view),
        "chips": [Link(str(term), view.address(query.without(term.name))) for term in query.terms],
        "rows": [_row(task, query, view, visitor.token) for task in page.tasks],
        "first_page": view.address(),
        "turned": view.address(order="" if view.oldest_first else OLDEST),
        "pager": _pager(page, view),
        "end": (page.newer if is_further_up else page.older) if page.is_cut else None,
        "go_on": view.address(after=page.newer) if is_further_up else view.address(before=page.older),
        "reads_up": is_further_up,
        "ceiling": CEILING,
        "acts": _acts(query, page) if visitor.can_operate else [],
        "help": _help(visitor),
    }


def _row(task: FoundTask, query: Query, view: View, token: Token) -> Row:
    of_type, of_queue = query.replacing(Name.TYPE, task.type), query.replacing(Name.QUEUE, task.queue)
    return Row(task, show_listed(task, token)["errorMessage"], view.address(of_type), view.address(of_queue))


def _tabs(query: Query, view: View) -> list[Link]:
    """Return the searches for each status, with the other terms as they are."""
    is_about_errors = any(query.get(name) is not None for name in ABOUT_ERRORS)
    chosen = query.get(Name.STATUS)
    tabs: dict[str | None, str] = {None: "Dead or retrying" if is_about_errors else "All"}
    tabs |= {status.lower(): status.capitalize() for status in TaskStatus}
    return [
        Link(title, view.address(query.replacing(Name.STATUS, value)), "current" if value == chosen else "")
        for value, title in tabs.items()
    ]


def _pager(page: SearchPage, view: View) -> list[Link]:
    """Return the links to the other pages, in the order of the list."""
    newer = [Link("Newer", view.address(after=page.newer))] if page.newer else []
    older = [Link("Older", view.address(before=page.older))] if page.older else []
    back, on = (older, newer) if view.oldest_first else (newer, older)
    return [
        *(Link(f"← {each.text}", each.path, "prev") for each in back),
        *(Link(f"{each.text} →", each.path, "next") for each in on),
    ]


def _acts(query: Query, page: SearchPage) -> list[Link]:
    """Return the bulk actions that can change tasks of this search. There is none for all tasks of the ledger."""
    if not query.terms or not (page.tasks or page.is_cut):
        return []
    statuses = query.statuses or frozenset(TaskStatus)
    return [
        Link(
            label,
            f"{PREFIX}/bulk/new?{urlencode({'action': verb, 'q': str(query)})}",
            "danger" if verb is BulkVerb.DISCARD else "",
        )
        for verb, label in ACTS.items()
        if statuses & CHANGES[verb]
    ]


def _help(visitor: Visitor) -> list[tuple[str, str, str]]:
    """Return each example, its meaning and its address; without those that the visitor may not use."""
    terms = [each for each in HELP if visitor.can_operate or not each[0].startswith(f"{Name.TEXT}:")]
    return [(example, meaning, View(example).address()) for example, meaning in terms]


ROUTES: Final = [Route(TASKS, show)]
