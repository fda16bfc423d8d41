"""Routes for operators: counts, dead tasks (`suspended`), and requeuing or discarding them in bulk.

A bulk request changes at most `limit` tasks, in batches that are transactions of their own, and at most for
BULK_SECONDS. Its answer says how many are left; it is safe to repeat it, and to interrupt it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Final

import anyio
from fastapi import APIRouter, Query
from pydantic import AwareDatetime, Field
from starlette.requests import Request

from api.authorization import require_scope
from api.bodies import JsonBody, Sentence, Text, read_body
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse, camel
from api.ledger_calls import call_ledger
from api.principals import actor_of
from api.shapes import (
    Shape,
    ShownDeadCount,
    ShownErrorCount,
    ShownKindCount,
    ShownListedTask,
    ShownStatusCount,
)
from api.task_list import PAGE, Limit, PageCursor, read_page
from api.tokens import Scope, Token
from api.visible_errors import show_listed
from models.engine import engine
from models.errors import Misuse
from models.status import STATUS_ALIASES, TaskStatus
from outbox.dead_rows import Counted, batch_size
from tasks.operations import dead_tasks
from tasks.operations.dead_tasks import Choice, DeadCount
from tasks.operations.listing import TaskFilter
from tasks.operations.sink_effects import key_lives
from tasks.operations.stats import Stats, read_stats

BULK_SECONDS: Final = 20.0
MOST_CHANGED: Final = 10_000
COUNTED: Final = 100_000  # a count above is not exact
NO_FILTER: Final = "The filter is empty: name what to change in `filter`, or send `all: true`."

router = APIRouter(prefix="/internal/tasks", tags=["operations"])
Operator = Annotated[Token, require_scope(Scope.OPERATE)]


class SuspendedFilter(JsonBody):
    """Which dead tasks. `after` and `before` are about the time of death."""

    type: Text | None = None
    queue: Text | None = None
    error_code: Text | None = None
    after: AwareDatetime | None = None
    before: AwareDatetime | None = None
    ids: Annotated[list[uuid.UUID], Field(min_length=1, max_length=1000)] | None = None

    def choice(self) -> Choice:
        return Choice(self.ids, self.type, self.queue, self.error_code, self.after, self.before)


class Discard(JsonBody):
    """The body of a bulk request."""

    filter: SuspendedFilter = SuspendedFilter()
    all: bool = False  # needed for an empty filter
    dry_run: bool = False
    reason: Sentence | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_CHANGED)] = 1000
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # tasks per second


class Requeue(Discard):
    """The body of a bulk requeue."""

    reset_steps: bool = False
    accept_duplicates: bool = False  # also tasks that are older than the key life of one of their sinks


class BulkChange(Shape):
    """How many tasks matched, were changed, and are left; and the groups of those that matched."""

    matched: int
    is_exact: bool
    changed: int
    left: int
    dry_run: bool
    groups: list[ShownDeadCount]


class TaskStats(Shape):
    """Tasks by status, in the words of both vocabularies, by queue and type, and the latest changes."""

    pending: int
    processing: int
    retry: int
    completed: int
    suspended: int
    statuses: list[ShownStatusCount]
    kinds: list[ShownKindCount]
    dead: list[ShownErrorCount]
    latest: list[ShownListedTask]


FEW: Final = {"filter": {"type": "demo.flaky"}, "reason": "the server is back", "dryRun": True}
BULK: Final = {200: Answer("What was changed, or would be.", BulkChange)}


@router.get("/stats", **documented("Count tasks", answers={200: Answer("The counts.", TaskStats)}))
async def read_task_stats(token: Operator) -> JsonResponse:
    """Count tasks by status, queue and type, and show the latest changes."""

    def read() -> Stats:
        with engine().connect() as connection:
            return read_stats(connection)

    found = await call_ledger(read)
    counts = {each.status: each.count for each in found.statuses}
    return JsonResponse(
        {name: counts[status] for name, status in STATUS_ALIASES.items()}
        | {part: [camel(each) for each in getattr(found, part)] for part in ("statuses", "kinds", "dead")}
        | {"latest": [show_listed(each, token) for each in found.latest]}
    )


@router.get("/suspended", **documented("List dead tasks", answers=PAGE))
async def list_suspended(
    *,
    token: Operator,
    type: Text | None = None,
    queue: Text | None = None,
    error_code: Annotated[Text | None, Query(alias="errorCode")] = None,
    after: AwareDatetime | None = None,
    before: AwareDatetime | None = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
) -> JsonResponse:
    """Answer one page of dead tasks, the latest death first."""
    chosen = TaskFilter({TaskStatus.DEAD}, type, queue, since=after, until=before, error_code=error_code)
    return JsonResponse(await read_page(token, chosen, limit=limit, cursor=cursor))


@router.post(
    "/suspended/requeue",
    **documented("Run dead tasks again", body=Body(Requeue, {"dry run": FEW}), answers=BULK),
)
async def requeue_suspended(request: Request, token: Operator) -> JsonResponse:
    """Run dead tasks again, longest dead first."""
    given = read_body(await request.body(), Requeue)
    choice = _require_choice(given)
    if not given.accept_duplicates:
        choice = await call_ledger(lambda: _leave_out_forgotten(choice))
    return await _change(token, given, choice, partial(dead_tasks.requeue, reset_steps=given.reset_steps))


@router.post(
    "/suspended/discard", **documented("Give up dead tasks", body=Body(Discard, {"dry run": FEW}), answers=BULK)
)
async def discard_suspended(request: Request, token: Operator) -> JsonResponse:
    """Give up dead tasks, longest dead first."""
    given = read_body(await request.body(), Discard)
    return await _change(token, given, _require_choice(given), dead_tasks.discard)


def _require_choice(given: Discard) -> Choice:
    choice = given.filter.choice()
    if choice.is_all and not given.all:
        raise Misuse(NO_FILTER)
    return choice


def _leave_out_forgotten(choice: Choice) -> Choice:
    """Leave out tasks whose sinks have deleted their keys: repeated effects would not be recognised."""
    with engine().connect() as connection:
        return choice.younger_than(key_lives(connection))


async def _change(token: Token, given: Discard, choice: Choice, act: Any) -> JsonResponse:
    found = await call_ledger(lambda: _count(choice))
    changed = 0
    if not given.dry_run:
        batches = act(
            engine(),
            choice,
            actor=actor_of(token),
            reason=given.reason,
            limit=given.limit,
            batch=batch_size(given.rate),
        )
        changed = await _change_in_time(batches, given.rate)
    return JsonResponse(
        {
            "matched": found.total,
            "isExact": found.total < COUNTED,
            "changed": changed,
            "left": max(0, found.total - changed),
            "dryRun": given.dry_run,
            "groups": [camel(each) for each in found.groups],
        }
    )


def _count(choice: Choice) -> Counted[DeadCount]:
    with engine().connect() as connection:
        return dead_tasks.count(connection, choice, limit=COUNTED)


async def _change_in_time(batches: Iterator[Sequence[uuid.UUID]], rate: float | None) -> int:
    """Change batch after batch, no faster than the rate, until all are changed or the time is over."""
    started_at, changed = time.monotonic(), 0
    while batch := await call_ledger(lambda: next(batches, None)):
        changed += len(batch)
        next_at = max(time.monotonic(), started_at + (changed / rate if rate else 0))
        if next_at - started_at > BULK_SECONDS:
            break
        await anyio.sleep(max(0.0, next_at - time.monotonic()))
    return changed
