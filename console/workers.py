"""Workers: who they are, what each runs now and for how long, and which types they know."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from console.door import PREFIX
from console.pages import render
from console.visitors import READERS, require_visitor
from models.clock import now
from models.engine import engine
from tasks.core.registered_types import RegisteredType, registered_types, unhandled_kinds
from tasks.operations.worker_list import LATE_SECONDS, Workers, list_workers

PATH: Final = f"{PREFIX}/workers"


@dataclass(frozen=True, slots=True)
class _Figures:
    at: datetime
    workers: Workers
    types: list[RegisteredType]
    unhandled: list[tuple[str, str]]  # queues and types of waiting tasks that no live worker can run

    @property
    def has_live(self) -> bool:
        return any(each.is_live for each in self.workers.workers)

    @property
    def unhandled_types(self) -> set[str]:
        return {type_ for _, type_ in self.unhandled}


async def show(request: Request) -> Response:
    await require_visitor(request, *READERS)

    def read() -> _Figures:
        with engine().connect() as connection:
            return _Figures(
                now(connection), list_workers(connection), registered_types(connection), unhandled_kinds(connection)
            )

    values = {"page": "workers", "figures": await call_ledger(read), "late_seconds": LATE_SECONDS}
    return render(request, "workers.html", values)


ROUTES: Final = [Route(PATH, show)]
