"""The route for receipts: read one, wait until it is saved, or follow it as server-sent events.

A receipt is answered with the ledger, the receipt log or the broker down, as long as one of the first two knows it. A
waiting request holds neither a thread nor a connection to the ledger between two looks.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Final

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.authorization import require_scope
from api.json_responses import JsonResponse
from api.receiving import receiving, signed
from api.tokens import Scope, Token
from api.unsaved import is_visible
from models.errors import CeleriacError, Misuse
from models.receipts import Level
from receipts.errors import UnknownReceipt
from receipts.receipt import Receipt

LONGEST_WAIT_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.5
COMMENT_SECONDS: Final = 15.0  # an empty comment keeps proxies from closing the connection
EVENT_STREAM: Final = "text/event-stream"
_WAIT: Final = re.compile(r"(?:^|[,;\s])wait=(\d{1,5})(?:$|[,;\s])")

router = APIRouter(prefix="/api/receipts")
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


@router.get("/{receipt_id}")
async def read_receipt(request: Request, receipt_id: str, token: Reader, level: Level = Level.ACCEPTED) -> Response:
    """Answer 200 if the receipt has the level, or is rejected, and 202 with the present receipt if it is not so far.

    `Prefer: wait=30` waits for the level. `Accept: text/event-stream` sends the present receipt and the next ones.
    """
    id_, wait = _parse(receipt_id), _read_wait(request)
    if level is Level.REJECTED:
        raise Misuse("`level` is accepted or saved.")
    if EVENT_STREAM in request.headers.get("accept", ""):
        first = await _find(token, id_)
        return StreamingResponse(_events(token, first, wait or LONGEST_WAIT_SECONDS), media_type=EVENT_STREAM)
    receipt = await _await_level(request, token, id_, level, wait)
    headers = {"Preference-Applied": f"wait={wait:g}"} if wait else None
    return JsonResponse(signed(receipt), 200 if _has(receipt, level) else 202, headers)


async def _await_level(request: Request, token: Token, id_: uuid.UUID, level: Level, seconds: float) -> Receipt:
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        receipt = await _find(token, id_)
        remaining = deadline - time.monotonic()
        if _has(receipt, level) or remaining <= 0 or await request.is_disconnected():
            return receipt
        await anyio.sleep(min(pause, remaining))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


async def _events(token: Token, receipt: Receipt, seconds: float) -> AsyncIterator[str]:
    """Yield the present receipt, and the last one when it is there."""
    yield _event(receipt)
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    commented_at = time.monotonic()
    while receipt.level is Level.ACCEPTED and time.monotonic() < deadline:
        await anyio.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        try:
            found = await _find(token, receipt.id)
        except CeleriacError:
            continue  # a server is down for the moment; the client keeps its stream
        if found.level is not receipt.level:
            receipt = found
            yield _event(receipt)
        elif time.monotonic() - commented_at > COMMENT_SECONDS:
            commented_at = time.monotonic()
            yield ":\n\n"


async def _find(token: Token, id_: uuid.UUID) -> Receipt:
    found = await receiving().find(id_)
    if not is_visible(found, token):
        raise UnknownReceipt(f"There is no receipt {id_}.")
    return found


def _has(receipt: Receipt, level: Level) -> bool:
    return level is Level.ACCEPTED or receipt.level is not Level.ACCEPTED


def _event(receipt: Receipt) -> str:
    return f"event: {receipt.level.value}\nid: {receipt.level.value}\ndata: {json.dumps(signed(receipt))}\n\n"


def _parse(value: str) -> uuid.UUID:
    try:
        return uuid.UUID(value)
    except ValueError:
        raise UnknownReceipt(f"There is no receipt {value[:100]!r}.") from None


def _read_wait(request: Request) -> float:
    """Return the seconds of `Prefer: wait=30`, at most LONGEST_WAIT_SECONDS."""
    found = _WAIT.search(request.headers.get("prefer", ""))
    return min(float(found[1]), LONGEST_WAIT_SECONDS) if found else 0.0
