"""The route for receipts: read one, wait until it is saved, or follow it as server-sent events.

A receipt is answered with the ledger, the receipt log or the broker down, as long as one of the first two knows it. A
waiting request holds neither a thread nor a connection to the ledger between two looks.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Final

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.authorization import require_scope
from api.documented import Answer, Header, documented
from api.event_streams import EVENT_STREAM, EventStream, event
from api.json_responses import JsonResponse
from api.receiving import receiving, signed
from api.shapes import SignedReceipt
from api.tokens import Scope, Token
from api.unsaved import is_visible
from api.waiting import LONGEST_WAIT_SECONDS, Patience
from models.errors import CeleriacError, Misuse
from models.receipts import Level
from receipts.errors import UnknownReceipt
from receipts.receipt import Receipt

FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.5

router = APIRouter(prefix="/api/receipts", tags=["receipts"])
Reader = Annotated[
    Token,
    require_scope(
        Scope.TASKS_READ,
        Scope.TASKS_READ_ALL,
        Scope.TASKS_SUBMIT,
        Scope.WORKFLOWS_SUBMIT,
        Scope.DOCUMENTS_WRITE,
        Scope.CHAT,
    ),
]


@router.get(
    "/{receipt_id}",
    **documented(
        "Read a receipt",
        headers=[Header("Prefer", "Wait for the level, at most 60 seconds.", "wait=30")],
        answers={
            200: Answer(
                "The receipt has the level, or is rejected; or a stream of events.", SignedReceipt, [EVENT_STREAM]
            ),
            202: Answer("The receipt as it is now: it does not have the level yet.", SignedReceipt),
        },
        errors=[400, 404],
    ),
)
async def read_receipt(request: Request, receipt_id: str, token: Reader, level: Level = Level.ACCEPTED) -> Response:
    """Answer 200 if the receipt has the level, or is rejected, and 202 with the present receipt if it is not so far.

    `Prefer: wait=30` waits for the level. `Accept: text/event-stream` sends the present receipt and the next ones.
    """
    id_, patience = _parse(receipt_id), Patience.of(request)
    if level is Level.REJECTED:
        raise Misuse("`level` is accepted or saved.")
    if EVENT_STREAM in request.headers.get("accept", ""):
        first = await _find(token, id_)
        return EventStream(_looks(token, first), seconds=patience.seconds or LONGEST_WAIT_SECONDS)
    receipt = await _await_level(request, token, id_, level, patience.seconds)
    return JsonResponse(signed(receipt), 200 if _has(receipt, level) else 202, patience.headers)


async def _await_level(request: Request, token: Token, id_: uuid.UUID, level: Level, seconds: float) -> Receipt:
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        receipt = await _find(token, id_)
        remaining = deadline - time.monotonic()
        if _has(receipt, level) or remaining <= 0 or await request.is_disconnected():
            return receipt
        await anyio.sleep(min(pause, remaining))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


async def _looks(token: Token, receipt: Receipt) -> AsyncGenerator[str | None]:
    """Yield the present receipt, and the last one when it is there; None for each look that found nothing new."""
    yield _event(receipt)
    pause = FIRST_PAUSE_SECONDS
    while receipt.level is Level.ACCEPTED:
        await anyio.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        try:
            found = await _find(token, receipt.id)
        except CeleriacError:
            found = receipt  # a server is down for the moment; the client keeps its stream
        yield _event(found) if found.level is not receipt.level else None
        receipt = found


async def _find(token: Token, id_: uuid.UUID) -> Receipt:
    found = await receiving().find(id_)
    if not is_visible(found, token):
        raise UnknownReceipt(f"There is no receipt {id_}.")
    return found


def _has(receipt: Receipt, level: Level) -> bool:
    return level is Level.ACCEPTED or receipt.level is not Level.ACCEPTED


def _event(receipt: Receipt) -> str:
    return event(signed(receipt), id=receipt.level.value, name=receipt.level.value)


def _parse(value: str) -> uuid.UUID:
    try:
        return uuid.UUID(value)
    except ValueError:
        raise UnknownReceipt(f"There is no receipt {value[:100]!r}.") from None
