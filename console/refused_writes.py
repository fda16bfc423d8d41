"""Refused writes: who tried to write after its lease was lost, to which task or event, and what became of that."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from console.door import PREFIX
from console.pages import render
from console.visitors import READERS, require_visitor
from models.clock import now
from models.engine import engine
from tasks.operations.refused_writes import Refusal, list_refused

PATH: Final = f"{PREFIX}/workers/refused"
NAMES: Final = {
    None: "All of tasks",
    Refusal.LATE_SUCCESS: "Late successes",
    Refusal.LEASE_LOST: "Other outcomes",
    Refusal.CONFLICT: "Outbox events",
}
SENTENCES: Final = {
    Refusal.LATE_SUCCESS: "Its handler succeeded, but the lease had been lost. The success was refused, and what the "
    "handler wrote in the ledger's transaction was rolled back.",
    Refusal.LEASE_LOST: "Its handler failed, or asked for a retry or a later run, but the lease had been lost. "
    "The outcome was refused.",
    Refusal.CONFLICT: "The event was published, or publishing it failed, but the lease had been lost. The outcome was "
    "refused; the event may be sent twice.",
}
LONGEST_ID: Final = 18  # digits of a bigint that fit in any case


async def show(request: Request) -> Response:
    await require_visitor(request, *READERS)
    given = request.query_params
    code = Refusal(given["code"]) if given.get("code") in list(Refusal) else None
    before, after = _id(given.get("before", "")), _id(given.get("after", ""))

    def read() -> dict[str, object]:
        with engine().connect() as connection:
            found = list_refused(connection, code, before=before, after=after)
            return {"at": now(connection), "found": found}

    figures = await call_ledger(read)
    tabs = [(name, _address(each), each is code) for each, name in NAMES.items()]
    values = {"page": "workers", **figures, "code": code, "tabs": tabs, "sentences": SENTENCES, "address": _address}
    return render(request, "refused_writes.html", values)


def _address(code: Refusal | None, **place: int) -> str:
    parameters = urlencode({**({"code": code} if code else {}), **place})
    return f"{PATH}?{parameters}" if parameters else PATH


def _id(given: str) -> int | None:
    return int(given) if given.isascii() and given.isdigit() and len(given) <= LONGEST_ID else None


ROUTES: Final = [Route(PATH, show)]
