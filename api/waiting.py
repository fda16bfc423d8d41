"""Wait for the end of a task that was submitted: `?wait=10`, or the header `Prefer: wait=10`.

A waiting request holds neither a thread nor a database connection: all of them share the statements of `task_feed.py`.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request

from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.submission import answer_submitted
from api.task_feed import task_feed
from api.tokens import Token
from api.visible_errors import show_task
from models.engine import engine
from models.errors import Misuse
from tasks.operations.listing import FINAL, UnknownTask
from tasks.operations.task_details import StoredTask, read_task
from tasks.submission.submit import Submitted

LONGEST_WAIT_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0  # between two looks whether the client is still there
_PREFERRED: Final = re.compile(r"(?:^|[,;\s])wait=(\d{1,5})(?:$|[,;\s])")

Wait = Annotated[float | None, Query(ge=0, le=LONGEST_WAIT_SECONDS, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request wants to wait, and the headers that say so."""

    seconds: float
    headers: dict[str, str]

    @classmethod
    def of(cls, request: Request, wait: float | None = None) -> Patience:
        """Read the parameter `wait`, or else the header `Prefer: wait=30`, of which at most 60 seconds are applied."""
        preferred = _PREFERRED.search(",".join(request.headers.getlist("prefer")))
        if wait is not None or preferred is None:
            return cls(wait or 0.0, {})
        seconds = min(float(preferred[1]), LONGEST_WAIT_SECONDS)
        return cls(seconds, {"Preference-Applied": f"wait={seconds:g}"})


def require_no_wait(wait: float | None) -> None:
    """Raise Misuse if a request for a receipt wants to wait, too."""
    if wait:
        raise Misuse("`wait` and `receipt` exclude each other: follow the receipt at /api/receipts/{id}.")


async def answer_final(request: Request, token: Token, submitted: Submitted, patience: Patience) -> JsonResponse:
    """Answer 200 with the whole task if it is final in time, otherwise with what was submitted."""
    task = await _wait_until_final(request, submitted, patience.seconds) if patience.seconds else None
    if task is None:
        response = answer_submitted(submitted)
    else:
        response = JsonResponse(show_task(task, token), headers={"Location": f"/api/tasks/{task.task_id}"})
    response.headers.update(patience.headers)
    return response


async def _wait_until_final(request: Request, submitted: Submitted, seconds: float) -> StoredTask | None:
    """Return the task, or None if it was not final in time, was pruned long ago, or the client disconnected."""
    if submitted.status in FINAL:
        return await call_ledger(partial(_read_if_final, submitted.task_id))
    deadline = time.monotonic() + seconds
    with task_feed().watch(submitted.task_id) as watcher:
        while (left := deadline - time.monotonic()) > 0 and not await request.is_disconnected():
            found = await watcher.take(min(left, LOOK_SECONDS))
            # Its history may go on after a final status, if it was requeued.
            if found and found[-1].to_status in FINAL:
                task = await call_ledger(partial(_read_if_final, submitted.task_id))
                if task is not None:
                    return task
    return None


def _read_if_final(task_id: uuid.UUID) -> StoredTask | None:
    with engine().connect() as connection:
        try:
            task = read_task(connection, task_id)
        except UnknownTask:
            return None
    return task if task.status in FINAL else None
