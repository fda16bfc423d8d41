"""Dead letters: the DEAD tasks grouped by type and error, and the page of one group.

A group can be muted, which only hides it from the list. Requeue and discard are links to the page for bulk actions.
Readers see the neutral sentence of an error, and neither tracebacks nor the words of operators.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import settings
from api.errors import NotFound
from api.ledger_calls import call_ledger
from api.tokens import Scope, Token
from api.visible_errors import show_listed
from console.answers import changed
from console.charts import Chart
from console.dead_charts import PERIODS, SPANS, begin, draw
from console.door import PREFIX
from console.history import STEPS, Period
from console.pages import render
from console.slow_answers import answers, broker_questions
from console.task_search import tasks_path
from console.visitors import READERS, require_form, require_visitor
from models.clock import now
from models.engine import engine
from models.errors import Misuse, Unreachable
from models.status import TaskStatus
from tasks import broker
from tasks.core.registry import NAME
from tasks.operations.dead_groups import (
    CEILING,
    DeadGroup,
    GroupKey,
    GroupOrder,
    count_groups,
    list_groups,
    read_deaths,
    read_latest,
    read_traceback,
    share_of_ceiling,
)
from tasks.operations.dead_mutes import MUTE_DAYS, REASON_LIMIT, Mute, MuteEnd, mute_group, read_mutes, unmute_group
from tasks.operations.stats import StatusCount

DEAD: Final = f"{PREFIX}/dead"
PAGE: Final = 25  # groups
LATEST: Final = 20  # tasks of a group
NO_ERROR: Final = "none"  # in addresses: the fingerprint of tasks that died without an error
IN_QUERY: Final = "-"  # in addresses: the type is a parameter, because a path cannot have it
FINGERPRINT: Final = re.compile(r"[0-9a-f]{1,16}")
NONE_DEAD: Final = StatusCount(TaskStatus.DEAD, 0, exact=True)
ORDERS: Final = {GroupOrder.LAST: "Last seen", GroupOrder.COUNT: "Count"}
ENDS: Final = {
    MuteEnd.UNMUTED: "until I unmute it",
    MuteEnd.NEXT_DEATH: "until it happens again",
    MuteEnd.DAYS: f"for {MUTE_DAYS} days",
}


@dataclass(frozen=True, slots=True)
class View:
    """How the list is shown: what its address says."""

    order: GroupOrder
    period: Period
    page: int

    def path(self, **changes: object) -> str:
        """Return the address of the same list with these changes."""
        values = {"order": self.order, "period": self.period, **changes}
        return f"{DEAD}?{urlencode({name: str(value) for name, value in values.items()})}"


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A group, what its latest task says about the error, and its chart if it is not muted."""

    path: str
    key: GroupKey
    group: DeadGroup | None  # None: it is muted, and no task of it is dead
    error_code: str | None = None
    sentence: str | None = None
    chart: Chart | None = None
    mute: Mute | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """What the list shows."""

    at: datetime
    dead: StatusCount
    total: int  # groups, the muted ones included
    groups: list[ShownGroup]
    muted: list[ShownGroup]
    has_more: bool


async def show(request: Request) -> Response:
    """Show the groups."""
    visitor = await require_visitor(request, *READERS)
    view = _view(request)
    queue = settings.current().ingest_dlq_queue
    asked = [broker_questions().ask(("depth", queue), lambda: _depth(queue))] if queue else []
    listed = await call_ledger(lambda: _list(view, visitor.token))
    letters = next(iter(await answers(asked)), None)
    values = {"page": "dead", "view": view, "listed": listed, "queue": queue, "letters": letters}
    return render(request, "dead.html", {**values, "orders": ORDERS, "periods": PERIODS, "steps": STEPS})


async def show_group(request: Request) -> Response:
    """Show one group: its chart, the latest tasks, and the traceback of the latest one."""
    visitor = await require_visitor(request, *READERS)
    key, period = _key(request), _period(request)
    values = await call_ledger(lambda: _group(key, period, visitor.token))
    query = search_of(key) if _can_be_searched(key) else ""
    addresses: dict[str, str] = {
        "mute": path_of(key, "/mute"),
        "unmute": path_of(key, "/unmute"),
        "tasks": query and f"{PREFIX}/tasks?{urlencode({'q': query})}",
        "requeue": query and f"{PREFIX}/bulk/new?{urlencode({'action': 'requeue', 'q': query})}",
        "discard": query and f"{PREFIX}/bulk/new?{urlencode({'action': 'discard', 'q': query})}",
        "of_type": tasks_path(type=key.type, status="dead"),
        **{each: path_of(key, period=each) for each in PERIODS},
    }
    values |= {"page": "dead", "key": key, "period": period, "periods": PERIODS, "steps": STEPS}
    values |= {"addresses": addresses, "ends": ENDS, "longest_reason": REASON_LIMIT}
    return render(request, "dead/group.html", values)


async def mute(request: Request) -> Response:
    """Mute a group."""
    visitor, form = await require_form(request, Scope.OPERATE)
    key = _key(request)

    def change() -> str:
        end = _end(form)
        mute_group(engine(), key, end=end, reason=str(form.get("reason", "")), actor=visitor.actor)
        return f"Muted {ENDS[end].replace('I unmute it', 'it is unmuted')}: the list shows this group at its end."

    return await changed(request, change, back=path_of(key))


async def unmute(request: Request) -> Response:
    """End the mute of a group."""
    await require_form(request, Scope.OPERATE)
    key = _key(request)

    def change() -> str:
        return "The group is not muted any more." if unmute_group(engine(), key) else "The group was not muted."

    return await changed(request, change, back=path_of(key))


def path_of(key: GroupKey, action: str = "", **parameters: object) -> str:
    """Return the address of a group. A type that no handler can have is a parameter: a path cannot have `..` or `/`."""
    fingerprint = quote(key.fingerprint or NO_ERROR, safe="")
    if not NAME.fullmatch(key.type):
        parameters["type"] = key.type
    type_ = IN_QUERY if "type" in parameters else key.type
    query = f"?{urlencode({name: str(value) for name, value in parameters.items()})}" if parameters else ""
    return f"{DEAD}/{type_}/{fingerprint}{action}{query}"


def search_of(key: GroupKey) -> str:
    """Return the search that finds the tasks of a group."""
    return f"status:dead type:{key.type} fingerprint:{key.fingerprint}"


def _can_be_searched(key: GroupKey) -> bool:
    return bool(key.fingerprint and NAME.fullmatch(key.type))


def _list(view: View, token: Token) -> Listed:
    with engine().connect() as connection:
        at, found, mutes = now(connection), list_groups(connection, view.order), read_mutes(connection)
        groups = {each.key: each for each in found.groups}
        if unlisted := [key for key in mutes if key not in groups]:
            counted = count_groups(connection, unlisted, ceiling=share_of_ceiling(unlisted))
            groups |= {each.key: each for each in counted}
        muted = {key: each for key, each in mutes.items() if not each.is_over(_last_at(groups.get(key)))}
        visible = [each.key for each in found.groups if each.key not in muted]
        start = (view.page - 1) * PAGE
        shown = visible[start : start + PAGE]
        latest = read_latest(connection, [*shown, *muted], limit=1)
        ceiling = CEILING if found.dead.exact else share_of_ceiling(shown)
        deaths = read_deaths(connection, shown, SPANS[view.period], begin(view.period, at), ceiling=ceiling)

    def shown_group(key: GroupKey, **more: Any) -> ShownGroup:
        task = next(iter(latest[key]), None)
        sentence = show_listed(task, token)["errorMessage"] if task else None
        error_code = task.error_code if task else None
        return ShownGroup(path_of(key), key, groups.get(key), error_code, sentence, **more)

    return Listed(
        at,
        found.dead,
        found.total,
        [shown_group(key, chart=draw(deaths[key], view.period, at)) for key in shown],
        [shown_group(key, mute=each) for key, each in muted.items()],
        len(visible) > start + PAGE,
    )


def _group(key: GroupKey, period: Period, token: Token) -> dict[str, Any]:
    with engine().connect() as connection:
        at = now(connection)
        group = next(iter(count_groups(connection, [key])), None)
        muted = read_mutes(connection).get(key)
        tasks = read_latest(connection, [key], limit=LATEST)[key]
        deaths = read_deaths(connection, [key], SPANS[period], begin(period, at))[key]
        is_open = tasks and token.has_scope(Scope.OPERATE)
        traceback = read_traceback(connection, tasks[0]) if is_open else None
    return {
        "at": at,
        "group": group,
        "dead": group.dead if group else NONE_DEAD,
        "tasks": tasks,
        "error_code": tasks[0].error_code if tasks else None,
        "sentence": show_listed(tasks[0], token)["errorMessage"] if tasks else None,
        "traceback": traceback,
        "chart": draw(deaths, period, at),
        "deaths": deaths,
        "mute": muted if muted and not muted.is_over(_last_at(group)) else None,
    }


def _last_at(group: DeadGroup | None) -> datetime | None:
    return group.last_at if group else None


def _depth(queue: str) -> int | None:
    """Return how many messages the dead-letter queue has; None if the broker does not answer."""
    try:
        return broker.depths([queue], patience_seconds=broker.SHOWN_SECONDS)[queue]
    except Unreachable:
        return None


def _key(request: Request) -> GroupKey:
    """Return the group that the address names. Raises NotFound if it can be none."""
    type_, fingerprint = request.path_params["type"], request.path_params["fingerprint"]
    if type_ == IN_QUERY:
        type_ = request.query_params.get("type", "")
    if fingerprint == NO_ERROR:
        return GroupKey(type_, "")
    if not FINGERPRINT.fullmatch(fingerprint):
        raise NotFound("The address is misspelt: it does not end with the fingerprint of an error.")
    return GroupKey(type_, fingerprint)


def _view(request: Request) -> View:
    order, page = request.query_params.get("order", ""), request.query_params.get("page", "")
    return View(
        GroupOrder(order) if order in list(GroupOrder) else GroupOrder.LAST,
        _period(request),
        int(page) if re.fullmatch(r"[1-9][0-9]{0,3}", page) else 1,
    )


def _period(request: Request) -> Period:
    given = request.query_params.get("period", "")
    return Period(given) if given in PERIODS else PERIODS[0]


def _end(form: FormData) -> MuteEnd:
    given = str(form.get("until", ""))
    if given not in list(MuteEnd):
        raise Misuse("Choose until when the group is muted.")
    return MuteEnd(given)


ROUTES: Final = [
    Route(DEAD, show),
    Route(f"{DEAD}/{{type}}/{{fingerprint}}/mute", mute, methods=["POST"]),
    Route(f"{DEAD}/{{type}}/{{fingerprint}}/unmute", unmute, methods=["POST"]),
    Route(f"{DEAD}/{{type}}/{{fingerprint}}", show_group),
]
