"""The route that submits a workflow and, if asked, waits for its result.

A waiting request holds neither a thread nor a database connection between two reads, so a thousand may wait at once.
"""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Final

import anyio
from fastapi import APIRouter, Query
from starlette.requests import Request

from api.authorization import require_scope
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.submission import (
    WantedReceipt,
    answer_submitted,
    read_idempotency_key,
    submit_and_commit,
    submit_for_receipt,
)
from api.tokens import Scope, Token
from api.visible_errors import show_task
from models.engine import engine
from models.errors import Misuse
from receipts.kinds import WORKFLOWS
from tasks.operations.listing import FINAL, statuses_of
from tasks.operations.task_details import StoredTask, read_task
from tasks.submission.envelope import NewTask
from tasks.submission.json_lines import read_json
from workflows import TYPE

LONGEST_WAIT_SECONDS: Final = 60
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 0.5

router = APIRouter(prefix="/api/workflows")
Submitter = Annotated[Token, require_scope(Scope.WORKFLOWS_SUBMIT)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, allow_inf_nan=False)]


@router.post("/apply")
async def apply(
    request: Request, token: Submitter, wait: Wait = 0, receipt: WantedReceipt | None = None
) -> JsonResponse:
    """Answer with the whole task if it is final within `wait` seconds, otherwise with what was submitted."""
    raw, key = await request.body(), read_idempotency_key(request)
    if receipt is not None:
        if wait:
            raise Misuse("`wait` and `receipt` exclude each other: follow the receipt at /api/receipts/{id}.")
        return await submit_for_receipt(token, raw, lambda: NewTask(TYPE, read_json(raw)), key, receipt, kind=WORKFLOWS)
    submitted = await call_ledger(lambda: submit_and_commit(token, NewTask(TYPE, read_json(raw)), key))
    if wait and (task := await _wait_until_final(request, submitted.task_id, wait)):
        return JsonResponse(show_task(task, token))
    return answer_submitted(submitted)


async def _wait_until_final(request: Request, task_id: uuid.UUID, seconds: float) -> StoredTask | None:
    """Return the task, or None if it was not final in time or the client disconnected."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while not (task := await call_ledger(partial(_read_if_final, task_id))):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or await request.is_disconnected():
            return None
        await anyio.sleep(min(pause, remaining))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
    return task


def _read_if_final(task_id: uuid.UUID) -> StoredTask | None:
    with engine().connect() as connection:
        is_final = not FINAL.isdisjoint(statuses_of(connection, [task_id]))
        return read_task(connection, task_id) if is_final else None
