"""The route that follows a task: its transitions as server-sent events, until it is final.

The id of an event is the id of its transition, so a client that reconnects with Last-Event-ID misses nothing. If there
is nothing more to come, a reconnecting client is answered 204, which tells a browser to stop.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Final

from fastapi import APIRouter, Header
from starlette.responses import Response

from api.documented import Answer, documented
from api.event_streams import EVENT_STREAM, EventStream, event
from api.ledger_calls import call_ledger
from api.principals import read_visible_task
from api.task_feed import task_feed
from api.tasks import Reader, parse_task_id
from api.tokens import Token
from api.unsaved import is_accepted
from api.visible_errors import show_transition
from models.engine import engine
from models.errors import Misuse
from tasks.operations.listing import FINAL, UnknownTask
from tasks.operations.new_transitions import MOST_PER_TASK, read_new_transitions

LONGEST_SECONDS: Final = 300.0  # of one stream
LOOK_SECONDS: Final = 1.0
LARGEST_ID: Final = 2**63 - 1

STREAM: Final = {
    200: Answer("Transitions as server-sent events.", also=[EVENT_STREAM]),
    204: Answer("Nothing more can come."),
}

router = APIRouter(prefix="/api/tasks", tags=["tasks"])


@router.get("/{task_id}/events", **documented("Follow a task", answers=STREAM, errors=[404]))
async def follow_task(
    task_id: str, token: Reader, last_event_id: Annotated[str | None, Header(max_length=100)] = None
) -> Response:
    """Send the history of the task, or what came after Last-Event-ID, and then each change as it happens."""
    id_, after = parse_task_id(task_id), _parse_event_id(last_event_id)
    if not await _has_more(token, id_, after):
        return Response(status_code=204)
    return EventStream(_transitions(token, id_, after), seconds=LONGEST_SECONDS)


async def _has_more(token: Token, task_id: uuid.UUID, after: int) -> bool:
    """Return False if the task is final and the client has seen all of it. Raises UnknownTask."""

    def read() -> bool:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, task_id)
            return task.status not in FINAL or bool(read_new_transitions(connection, {task_id: after}))

    try:
        return await call_ledger(read)
    except UnknownTask:
        if await is_accepted(token, task_id):
            return True  # its history begins when it is saved
        raise


async def _transitions(token: Token, task_id: uuid.UUID, after: int) -> AsyncGenerator[str | None]:
    with task_feed().watch(task_id, after=after) as watcher:
        while True:
            found = await watcher.take(LOOK_SECONDS)
            for each in found:
                yield event({"taskId": task_id, **show_transition(each, token)}, id=each.id)
            # A final status in the middle of a history was followed by a requeue. A full page may have a successor.
            if found and found[-1].to_status in FINAL and len(found) < MOST_PER_TASK:
                return
            yield None


def _parse_event_id(given: str | None) -> int:
    if not given:
        return 0
    if not (given.isascii() and given.isdigit()) or int(given) > LARGEST_ID:
        raise Misuse("Last-Event-ID is not the id of an event of this stream.")
    return int(given)
