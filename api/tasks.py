"""Routes for tasks: submit one, read one, read its history and its effects in sinks."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter
from starlette.requests import Request

from api.authorization import require_scope
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.principals import read_visible_task
from api.submission import (
    WantedReceipt,
    answer_submitted,
    read_idempotency_key,
    submit_and_commit,
    submit_for_receipt,
)
from api.tokens import Scope, Token
from api.unsaved import read_or_show_unsaved
from api.visible_errors import show_effect, show_task, show_transition
from models.engine import engine
from receipts.kinds import TASKS
from tasks.operations import sink_effects, task_details
from tasks.operations.listing import UnknownTask
from tasks.submission.json_lines import read_envelope

router = APIRouter(prefix="/api/tasks")
SINK_SECONDS = 10.0  # to ask sinks, some of which may be unreachable
Submitter = Annotated[Token, require_scope(Scope.TASKS_SUBMIT)]
Reader = Annotated[Token, require_scope(Scope.TASKS_READ, Scope.TASKS_READ_ALL)]


@router.post("")
async def submit_task(request: Request, token: Submitter, receipt: WantedReceipt | None = None) -> JsonResponse:
    raw, key = await request.body(), read_idempotency_key(request)
    if receipt is not None:
        return await submit_for_receipt(token, raw, lambda: read_envelope(raw), key, receipt, kind=TASKS)
    return await call_ledger(lambda: answer_submitted(submit_and_commit(token, read_envelope(raw), key)))


@router.get("/{task_id}")
async def read_task(task_id: str, token: Reader) -> JsonResponse:
    """Answer with the task. One that is accepted and not saved yet is known to the receipt log only."""

    def read(id_: uuid.UUID) -> JsonResponse:
        with engine().connect() as connection:
            return JsonResponse(show_task(read_visible_task(connection, token, id_), token))

    return await read_or_show_unsaved(token, parse_task_id(task_id), read)


@router.get("/{task_id}/transitions")
async def read_transitions(task_id: str, token: Reader) -> JsonResponse:
    def read() -> JsonResponse:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, parse_task_id(task_id))
            history = [show_transition(each, token) for each in task_details.read_transitions(connection, task.task_id)]
        return JsonResponse({"taskId": task.task_id, "transitions": history})

    return await call_ledger(read)


@router.get("/{task_id}/effects")
async def read_effects(task_id: str, token: Reader) -> JsonResponse:
    """Say what the task has done in sinks. Errors of sinks that cannot be reached are for operators only."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, parse_task_id(task_id))
            sinks = sink_effects.sinks_by_type(connection).get(task.type, ())
        effects = sink_effects.effects_of(task.task_id, task.status, sinks)
        return JsonResponse({"taskId": task.task_id, "effects": [show_effect(each, token) for each in effects]})

    return await call_ledger(read, more_seconds=SINK_SECONDS)


def parse_task_id(value: str) -> uuid.UUID:
    """Return the id, or raise UnknownTask if it is not a UUID: such a task cannot exist."""
    try:
        return uuid.UUID(value)
    except ValueError:
        raise UnknownTask(value[:100]) from None
