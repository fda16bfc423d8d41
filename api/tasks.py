"""Tasks: submit one, look at one, read its history."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from api.authorization import needs
from api.json_responses import Answer, camel
from api.principals import visible
from api.submission import header_key, receipt, submitted
from api.tokens import Scope, Token
from models.engine import engine
from tasks.operations import task_details
from tasks.operations.listing import UnknownTask
from tasks.submission.json_lines import read_envelope

router = APIRouter(prefix="/api/tasks")
Submits = Annotated[Token, needs(Scope.TASKS_SUBMIT)]
Reads = Annotated[Token, needs(Scope.TASKS_READ, Scope.TASKS_READ_ALL)]


@router.post("")
async def submit_task(request: Request, token: Submits) -> Answer:
    raw, key = await request.body(), header_key(request)
    return await run_in_threadpool(lambda: receipt(submitted(token, read_envelope(raw), key)))


@router.get("/{task_id}")
def read_task(task_id: str, token: Reads) -> Answer:
    with engine().connect() as connection:
        return Answer(visible(connection, token, known_id(task_id)).envelope())


@router.get("/{task_id}/transitions")
def read_transitions(task_id: str, token: Reads) -> Answer:
    with engine().connect() as connection:
        task = visible(connection, token, known_id(task_id))
        found = task_details.transitions(connection, task.task_id)
    return Answer({"taskId": task.task_id, "transitions": [camel(each) for each in found]})


def known_id(given: str) -> uuid.UUID:
    """What is no id is nobody's."""
    try:
        return uuid.UUID(given)
    except ValueError:
        raise UnknownTask(given[:100]) from None
