"""Routes for operators: look at queues and handlers, pause and resume queues, set the number of worker processes."""

from __future__ import annotations

import threading
from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

import settings
from api.authorization import require_scope
from api.bodies import JsonBody, Sentence, read_body
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse, camel
from api.ledger_calls import call_ledger
from api.principals import actor_of
from api.shapes import ShownHandler, ShownPause, ShownQueue, ShownWorker, list_of
from api.tokens import Scope, Token
from models.engine import engine
from tasks.core.registered_types import registered_types
from tasks.operations.pauses import QueuePause, pause_queue, resume_queue, wake_resumed
from tasks.operations.queue_list import list_queues, show_queues
from tasks.operations.scale import MOST_PROCESSES, read_sizes, set_scale

BROKER_SECONDS: Final = 1.0  # to count the messages in the broker
router = APIRouter(prefix="/internal", tags=["queues"])
Operator = Annotated[Token, require_scope(Scope.OPERATE)]


PAUSED: Final = {200: Answer("The pause.", ShownPause)}
RESUMED: Final = {200: Answer("The pauses that ended.", list_of("Resumed", "ended", ShownPause, queue=str))}
SCALED: Final = {
    202: Answer("The target, and the workers that follow it.", list_of("Scaled", "workers", ShownWorker, queue=str))
}
QUEUES: Final = {
    200: Answer("The queues.", list_of("Queues", "queues", ShownQueue, dlq=str | None, dlq_messages=int | None))
}
HANDLERS: Final = {
    200: Answer("The types that workers have registered.", list_of("Handlers", "handlers", ShownHandler))
}


class Pause(JsonBody, strict=True):
    """Why, and whether only new tasks are refused."""

    reason: Sentence | None = None
    intake: bool = False


class Resume(JsonBody, strict=True):
    """Whether only the pause of the intake ends."""

    intake: bool = False


class Scale(JsonBody, strict=True):
    """Without `processes`, workers return to the number that they were started with."""

    queue: str = "ingest"
    processes: int | None = Field(None, ge=1, le=MOST_PROCESSES)


@router.get("/queues", **documented("List the queues", answers=QUEUES))
async def read_queues(_token: Operator) -> JsonResponse:
    """Answer with what waits in each queue, what runs, who has paused it, and its workers."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            return JsonResponse(show_queues(list_queues(connection, settings.current())))

    return await call_ledger(read, more_seconds=BROKER_SECONDS)


@router.get("/handlers", **documented("List the handlers", answers=HANDLERS))
async def read_handlers(_token: Operator) -> JsonResponse:
    """Answer with the types that workers know: their queue, attempts, batch, priority, limits, and the live workers."""

    def read() -> JsonResponse:
        with engine().connect() as connection:
            return JsonResponse({"handlers": [camel(each) for each in registered_types(connection)]})

    return await call_ledger(read)


@router.post(
    "/queues/{queue}/pause",
    **documented(
        "Pause a queue",
        body=Body(Pause, {"why": {"reason": "moving the CRM"}}, is_required=False),
        answers=PAUSED,
        errors=[404],
    ),
)
async def pause(queue: str, request: Request, token: Operator) -> JsonResponse:
    """Let no further task of the queue start; with `intake`, refuse new tasks instead."""
    given = read_body(await request.body(), Pause)

    def write() -> JsonResponse:
        paused = pause_queue(
            engine(), settings.current(), queue, actor=actor_of(token), reason=given.reason, intake=given.intake
        )
        return JsonResponse(camel(paused))

    return await call_ledger(write)


@router.post(
    "/queues/{queue}/resume",
    **documented("Resume a queue", body=Body(Resume, {"both": {}}, is_required=False), answers=RESUMED, errors=[404]),
)
async def resume(queue: str, request: Request, token: Operator) -> JsonResponse:
    """End the pauses. Waking a million tasks takes longer than a request may, so a thread does it."""
    given = read_body(await request.body(), Resume)

    def write() -> list[QueuePause]:
        return resume_queue(engine(), settings.current(), queue, intake_only=given.intake, actor=actor_of(token))

    ended = await call_ledger(write)
    threading.Thread(target=_wake, args=(ended,), name="wake-resumed", daemon=True).start()
    return JsonResponse({"queue": queue, "ended": [camel(each) for each in ended]})


@router.post(
    "/workers/scale",
    **documented(
        "Set the number of processes of workers",
        body=Body(Scale, {"four": {"queue": "ingest", "processes": 4}}, is_required=False),
        answers=SCALED,
        errors=[404],
    ),
)
async def scale(request: Request, token: Operator) -> JsonResponse:
    """Set the number of processes of each prefork worker of a queue. They follow within seconds."""
    given = read_body(await request.body(), Scale)

    def write() -> JsonResponse:
        set_scale(engine(), settings.current(), given.queue, given.processes, actor=actor_of(token))
        with engine().connect() as connection:
            workers = [camel(each) for each in read_sizes(connection, given.queue)]
        return JsonResponse({"queue": given.queue, "processes": given.processes, "workers": workers}, 202)

    return await call_ledger(write)


def _wake(ended: list[QueuePause]) -> None:
    for _ in wake_resumed(engine(), ended):
        pass
