"""Queues and limits: what waits and who runs it, how much of each limit is used; pause, resume and scale a queue."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import settings
from api.ledger_calls import call_ledger
from api.tokens import Scope
from console.answers import changed
from console.door import PREFIX
from console.pages import render
from console.pipeline import age_level
from console.visitors import READERS, require_form, require_visitor
from models.clock import now
from models.engine import engine
from models.errors import Misuse
from tasks.broker import SHOWN_SECONDS
from tasks.operations.limit_use import LimitUse, read_limit_use
from tasks.operations.pauses import pause_queue, resume_queue, wake_resumed_in_thread
from tasks.operations.queue_list import Queues, list_queues
from tasks.operations.scale import MOST_PROCESSES, set_scale
from tasks.operations.stats import KIND_CEILING

PATH: Final = f"{PREFIX}/queues"
SHOWN_VALUES: Final = 5  # of `limit_by`, for each type


@dataclass(frozen=True, slots=True)
class _Figures:
    at: datetime
    limits: list[LimitUse]
    queues: Queues


async def show(request: Request) -> Response:
    await require_visitor(request, *READERS)
    current = settings.current()

    def read() -> _Figures:
        with engine().connect() as connection:
            at, limits = now(connection), read_limit_use(connection)
            # The queues come last: the broker is asked after the transaction.
            return _Figures(at, limits, list_queues(connection, current, kind_ceiling=KIND_CEILING))

    figures = await call_ledger(read, more_seconds=SHOWN_SECONDS)
    has_own_queues = current.ingest_queue == "celery"
    values = {
        "page": "queues",
        "figures": figures,
        "has_own_queues": has_own_queues,  # each queue has its own messages in the broker
        "is_broker_silent": has_own_queues and all(each.messages is None for each in figures.queues.queues),
        "levels": {each.queue: age_level(each.oldest_due) for each in figures.queues.queues},
        "most_processes": MOST_PROCESSES,
        "shown_values": SHOWN_VALUES,
        "threshold": current.backlog_alert_threshold,
    }
    return render(request, "queues.html", values)


async def pause(request: Request) -> Response:
    visitor, form = await require_form(request, Scope.OPERATE)
    queue, reason = str(form.get("queue", "")), str(form.get("reason", "")).strip() or None
    holds_tasks, refuses_new = "starts" in form, "intake" in form

    def write() -> str:
        if not (holds_tasks or refuses_new):
            raise Misuse("Choose what the queue shall stop: starting tasks, taking new ones, or both.")
        for intake, is_chosen in ((False, holds_tasks), (True, refuses_new)):
            if is_chosen:
                pause_queue(engine(), settings.current(), queue, actor=visitor.actor, reason=reason, intake=intake)
        return f"The queue {queue} is paused: {_effect(holds_tasks, refuses_new)}. Tasks that run are not interrupted."

    return await changed(request, write, back=_anchor(queue))


async def resume(request: Request) -> Response:
    _, form = await require_form(request, Scope.OPERATE)
    queue, intake_only = str(form.get("queue", "")), "intake_only" in form

    def write() -> str:
        ended = resume_queue(engine(), settings.current(), queue, intake_only=intake_only)
        wake_resumed_in_thread(engine(), ended)
        if not ended:
            return f"The queue {queue} was not paused."
        if all(each.intake for each in ended):
            return f"The queue {queue} takes new tasks again."
        return f"The queue {queue} is resumed; its due tasks are being woken."

    return await changed(request, write, back=_anchor(queue))


async def scale(request: Request) -> Response:
    visitor, form = await require_form(request, Scope.OPERATE)
    queue, given = str(form.get("queue", "")), str(form.get("processes", "")).strip()

    def write() -> str:
        processes = None if "reset" in form else _number(given)
        set_scale(engine(), settings.current(), queue, processes, actor=visitor.actor)
        if processes is None:
            return f"Workers of the queue {queue} return to the number of processes that they were started with."
        return f"Each prefork worker of the queue {queue} gets {processes} processes, within seconds."

    return await changed(request, write, back=_anchor(queue))


def _effect(holds_tasks: bool, refuses_new: bool) -> str:
    parts = ["no further task starts"] * holds_tasks + ["new tasks are refused"] * refuses_new
    return " and ".join(parts)


def _number(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise Misuse(f"The number of processes must be a number from 1 to {MOST_PROCESSES}.")
    return int(given)


def _anchor(queue: str) -> str:
    return f"{PATH}#{quote(queue)}"


ROUTES: Final = [
    Route(PATH, show),
    Route(f"{PATH}/pause", pause, methods=["POST"]),
    Route(f"{PATH}/resume", resume, methods=["POST"]),
    Route(f"{PATH}/scale", scale, methods=["POST"]),
]
