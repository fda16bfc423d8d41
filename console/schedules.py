"""Schedules: what runs periodically, its next and its last run; pause, resume, and run one now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.tokens import Scope
from console import formats
from console.answers import changed
from console.door import PREFIX
from console.pages import render
from console.visitors import READERS, Visitor, require_form, require_visitor
from models.clock import now
from models.driver_values import storable
from models.engine import engine
from tasks.operations import schedules
from tasks.operations.pauses import REASON_LIMIT

PATH: Final = f"{PREFIX}/schedules"


async def show(request: Request) -> Response:
    await require_visitor(request, *READERS)

    def read() -> dict[str, object]:
        with engine().connect() as connection:
            return {"at": now(connection), "schedules": schedules.list_schedules(connection)}

    return render(request, "schedules.html", {"page": "queues", **await call_ledger(read)})


async def pause(request: Request) -> Response:
    def write(name: str, visitor: Visitor, reason: str) -> str:
        with engine().begin() as connection:
            schedules.pause(connection, name, actor=visitor.actor, reason=reason or None)
        return f"The schedule {name} is paused. Tasks that exist already run."

    return await _change(request, write)


async def resume(request: Request) -> Response:
    def write(name: str, _visitor: Visitor, _reason: str) -> str:
        with engine().begin() as connection:
            next_at = schedules.resume(connection, name)
        when = f"its next run is at {formats.moment(next_at)}" if next_at else "it has no next run"
        return f"The schedule {name} is resumed; {when}. Runs that were due during the pause are skipped."

    return await _change(request, write)


async def run(request: Request) -> Response:
    def write(name: str, visitor: Visitor, _reason: str) -> str:
        done = schedules.run_now(engine(), name, actor=visitor.actor)
        return f"One task of the schedule {name} was submitted: {done.task_id}. Its planned runs stay."

    return await _change(request, write)


async def _change(request: Request, write: Callable[[str, Visitor, str], str]) -> Response:
    """Change the schedule that the form names, and go back to it."""
    visitor, form = await require_form(request, Scope.OPERATE)
    name = storable(str(form.get("name", "")))
    reason = storable(str(form.get("reason", "")).strip()[:REASON_LIMIT])
    return await changed(request, lambda: write(name, visitor, reason), back=f"{PATH}#{quote(name)}")


ROUTES: Final = [
    Route(PATH, show),
    Route(f"{PATH}/pause", pause, methods=["POST"]),
    Route(f"{PATH}/resume", resume, methods=["POST"]),
    Route(f"{PATH}/run", run, methods=["POST"]),
]
