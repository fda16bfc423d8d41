"""Workflows: apply one, and wait for its result if wanted.

Who waits holds neither a thread nor a connection between two looks at the ledger: a thousand may wait at once.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Final

import anyio
from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from api.authorization import needs
from api.json_responses import Answer
from api.submission import header_key, receipt, submitted
from api.tokens import Scope, Token
from models.engine import engine
from tasks.operations.listing import FINAL, statuses_of
from tasks.operations.task_details import ShownTask, shown
from tasks.submission.envelope import NewTask
from tasks.submission.json_lines import read_json
from workflows import TYPE

LONGEST_WAIT_SECONDS: Final = 60
FIRST_LOOK_SECONDS: Final = 0.05
SLOWEST_LOOK_SECONDS: Final = 0.5

router = APIRouter(prefix="/api/workflows")
Applies = Annotated[Token, needs(Scope.WORKFLOWS_SUBMIT)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, allow_inf_nan=False)]


@router.post("/apply")
async def apply(request: Request, token: Applies, wait: Wait = 0) -> Answer:
    """The whole task if it is final in time; otherwise what `POST /api/tasks` answers."""
    raw, key = await request.body(), header_key(request)
    made = await run_in_threadpool(lambda: submitted(token, NewTask(TYPE, read_json(raw)), key))
    if wait and (task := await _final(request, made.task_id, wait)):
        return Answer(task.envelope())
    return receipt(made)


async def _final(request: Request, task_id: uuid.UUID, seconds: float) -> ShownTask | None:
    """None: it was not final in time, or nobody is waiting any more."""
    deadline, pause = time.monotonic() + seconds, FIRST_LOOK_SECONDS
    while not (task := await run_in_threadpool(_look, task_id)):
        left = deadline - time.monotonic()
        if left <= 0 or await request.is_disconnected():
            return None
        await anyio.sleep(min(pause, left))
        pause = min(pause * 1.5, SLOWEST_LOOK_SECONDS)
    return task


def _look(task_id: uuid.UUID) -> ShownTask | None:
    with engine().connect() as connection:
        is_final = not FINAL.isdisjoint(statuses_of(connection, [task_id]))
        return shown(connection, task_id) if is_final else None
