"""Routes for tasks: submit one, read one, its history and its effects in sinks, and why it is not running."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from fastapi import APIRouter
from starlette.requests import Request

import settings
from api.authorization import require_scope
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.principals import read_visible_task
from api.shapes import ShownEffect, ShownReason, ShownTransition, Task, UnsavedTask, list_of
from api.submission import (
    KEY_HEADER,
    SUBMITTED,
    WantedReceipt,
    read_idempotency_key,
    submit_and_commit,
    submit_for_receipt,
)
from api.tokens import Scope, Token
from api.unsaved import read_or_show_unsaved
from api.visible_errors import show_effect, show_reason, show_task, show_transition
from api.waiting import Patience, Wait, answer_final, require_no_wait
from models.engine import engine
from receipts.kinds import TASKS
from tasks.core.registered_types import registered_types
from tasks.operations import sink_effects, task_details
from tasks.operations.listing import UnknownTask
from tasks.operations.why_waiting import reasons
from tasks.submission.envelope import TaskEnvelope
from tasks.submission.json_lines import read_envelope

router = APIRouter(prefix="/api/tasks", tags=["tasks"])
BROKER_SECONDS: Final = 5.0  # to ask the broker, and the workers, which have a second to answer
SINK_SECONDS = 10.0  # to ask sinks, some of which may be unreachable
Submitter = Annotated[Token, require_scope(Scope.TASKS_SUBMIT)]
Reader = Annotated[Token, require_scope(Scope.TASKS_READ, Scope.TASKS_READ_ALL, Scope.OPERATE)]
EXAMPLES: Final = {
    "short": {"type": "demo.flaky", "payload": {"fail": 1}},
    "all fields": {
        "type": "demo.flaky",
        "payload": {"fail": 1},
        "context": {"idempotencyKey": "invoice 17", "traceId": "4bf92f3577b34da6", "user": "ann"},
        "retry": {"max": 5},
        "queue": "ingest",
        "priority": 7,
        "runAt": "2030-01-01T08:00:00+00:00",
        "partitionKey": "customer 5",
    },
}
SHOWN: Final = {200: Answer("The task; one that is not saved yet has fewer fields.", Task | UnsavedTask)}
HISTORY: Final = {
    200: Answer("Its changes.", list_of("Transitions", "transitions", ShownTransition, task_id=uuid.UUID))
}
WHY: Final = {
    200: Answer("Every reason, the most important first.", list_of("Why", "why", ShownReason, task_id=uuid.UUID))
}
EFFECTS: Final = {200: Answer("Its effects.", list_of("Effects", "effects", ShownEffect, task_id=uuid.UUID))}


@router.post(
    "",
    **documented(
        "Submit a task",
        body=Body(TaskEnvelope, EXAMPLES),
        headers=[KEY_HEADER],
        answers=SUBMITTED,
        errors=[409, 429],
    ),
)
async def submit_task(
    request: Request, token: Submitter, wait: Wait = None, receipt: WantedReceipt | None = None
) -> JsonResponse:
    """Answer when the task is stored, or with `receipt=accepted` when the receipt log has it.

    With `wait` the answer is the whole task if it is final within that many seconds.
    """
    raw, key = await request.body(), read_idempotency_key(request)
    if receipt is not None:
        require_no_wait(wait)
        return await submit_for_receipt(token, raw, lambda: read_envelope(raw), key, receipt, kind=TASKS)
    submitted = await call_ledger(lambda: submit_and_commit(token, read_envelope(raw), key))
    return await answer_final(request, token, submitted, Patience.of(request, wait))


@router.get("/{task_id}", **documented("Read a task", answers=SHOWN, errors=[404]))
async def read_task(task_id: str, token: Reader) -> JsonResponse:
    """Answer with the task. One that is accepted and not saved yet is known to the receipt log only."""

    def read(id_: uuid.UUID) -> JsonResponse:
        with engine().connect() as connection:
            return JsonResponse(show_task(read_visible_task(connection, token, id_), token))

    return await read_or_show_unsaved(token, parse_task_id(task_id), read)


@router.get("/{task_id}/transitions", **documented("Read the history of a task", answers=HISTORY, errors=[404]))
async def read_transitions(task_id: str, token: Reader) -> JsonResponse:
    """Answer with every change of its status, oldest first. Messages and actors are for operators only."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, parse_task_id(task_id))
            history = [show_transition(each, token) for each in task_details.read_transitions(connection, task.task_id)]
        return JsonResponse({"taskId": task.task_id, "transitions": history})

    return await call_ledger(read)


@router.get("/{task_id}/effects", **documented("Read what a task did in sinks", answers=EFFECTS, errors=[404]))
async def read_effects(task_id: str, token: Reader) -> JsonResponse:
    """Say what the task has done in sinks. Errors of sinks that cannot be reached are for operators only."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, parse_task_id(task_id))
            sinks = sink_effects.sinks_by_type(connection).get(task.type, ())
        effects = sink_effects.effects_of(task.task_id, task.status, sinks)
        return JsonResponse({"taskId": task.task_id, "effects": [show_effect(each, token) for each in effects]})

    return await call_ledger(read, more_seconds=SINK_SECONDS)


@router.get("/{task_id}/why", **documented("Read why a task is not running", answers=WHY, errors=[404]))
async def read_why(task_id: str, token: Reader) -> JsonResponse:
    """Answer with every reason why the task is not running. Names of workers and addresses are for operators only."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            task = read_visible_task(connection, token, parse_task_id(task_id))
            found = task_details.read_details(connection, task.task_id)
            known_types = {each.type for each in registered_types(connection)}
        why = reasons(found, settings.current(), known_types=known_types)
        return JsonResponse({"taskId": task.task_id, "why": [show_reason(each, token) for each in why]})

    return await call_ledger(read, more_seconds=BROKER_SECONDS)


def parse_task_id(value: str) -> uuid.UUID:
    """Return the id, or raise UnknownTask if it is not a UUID: such a task cannot exist."""
    try:
        return uuid.UUID(value)
    except ValueError:
        raise UnknownTask(value[:100]) from None
