"""Routes that change a task: cancel it before it runs, or run it again now."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import APIRouter
from sqlalchemy import Engine
from starlette.requests import Request

from api.authorization import require_scope
from api.bodies import JsonBody, Sentence, read_body
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.principals import actor_of, require_changeable
from api.shapes import Shape
from api.tasks import parse_task_id
from api.tokens import Scope, Token
from models.engine import engine
from models.status import TaskStatus
from tasks.operations.discard import cancel
from tasks.operations.listing import status_of
from tasks.operations.retry_now import retry_now

router = APIRouter(prefix="/api/tasks", tags=["tasks"])
Changer = Annotated[Token, require_scope(Scope.TASKS_SUBMIT, Scope.OPERATE)]
Change = Callable[..., TaskStatus]


class WithReason(JsonBody):
    """Why, for the history of the task."""

    reason: Sentence | None = None


class Changed(Shape):
    """The status of the task before and after."""

    task_id: uuid.UUID
    was: TaskStatus
    status: TaskStatus


CHANGED: Final = {200: Answer("The task was changed.", Changed)}
REASON: Final = Body(WithReason, {"why": {"reason": "ordered twice"}}, is_required=False)


@router.post("/{task_id}/cancel", **documented("Cancel a task", body=REASON, answers=CHANGED, errors=[404, 409]))
async def cancel_task(request: Request, task_id: str, token: Changer) -> JsonResponse:
    """Discard a task that waits. One that runs or has ended is answered 409."""
    return await _change(cancel, token, task_id, await request.body())


@router.post("/{task_id}/retry", **documented("Run a task now", body=REASON, answers=CHANGED, errors=[404, 409]))
async def retry_task(request: Request, task_id: str, token: Changer) -> JsonResponse:
    """Run a task now that waits for its time or is DEAD. One that is due, runs or has ended is answered 409."""
    return await _change(retry_now, token, task_id, await request.body())


async def _change(change: Change, token: Token, task_id: str, raw: bytes) -> JsonResponse:
    id_, given = parse_task_id(task_id), read_body(raw, WithReason)
    return await call_ledger(lambda: _change_in_ledger(engine(), change, token, id_, given.reason))


def _change_in_ledger(
    engine: Engine, change: Change, token: Token, task_id: uuid.UUID, reason: str | None
) -> JsonResponse:
    with engine.connect() as connection:
        require_changeable(connection, token, task_id)
    was = change(engine, task_id, actor=actor_of(token), reason=reason)
    with engine.connect() as connection:
        return JsonResponse({"taskId": task_id, "was": was, "status": status_of(connection, task_id)})
