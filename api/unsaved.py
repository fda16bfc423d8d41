"""The status of a task that may be accepted and not saved yet.

The ledger is asked first, because it knows most. If it does not know the task, or does not answer, the claim in the
receipt log says how far the task is. A task that was accepted is never answered with 404.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import Final

from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.principals import sees_all
from api.receiving import receiving
from api.tokens import Token
from models.database_errors import translate
from models.errors import LedgerBusy, Unreachable
from models.receipts import Level
from models.status import TaskStatus
from receipts import status
from receipts.errors import ReceiptLogUnreachable, UnknownReceipt
from receipts.receipt import Receipt, utc
from tasks.operations.listing import UnknownTask

# If the ledger is silent, Redis is asked afterwards, and the answer must still come within 5 s.
LESS_SECONDS: Final = 1.0
LOG_SECONDS: Final = 0.5


async def read_or_show_unsaved(
    token: Token, task_id: uuid.UUID, read: Callable[[uuid.UUID], JsonResponse]
) -> JsonResponse:
    """Return what `read` returns for the task, or what the receipt log says about it."""
    try:
        return await call_ledger(partial(read, task_id), more_seconds=-LESS_SECONDS)
    except UnknownTask:
        receipt = await _find(token, task_id)
        if receipt is None:
            raise
    except Exception as error:
        if not isinstance(translate(error) or error, Unreachable | LedgerBusy):
            raise
        receipt = await _find_without_ledger(token, task_id)
        if receipt is None or receipt.level is Level.SAVED:
            raise  # only the ledger knows how far a saved task is
    if receipt.level is Level.SAVED:
        return await call_ledger(partial(read, receipt.task_id or receipt.id))
    return JsonResponse(_shown(receipt))


async def is_accepted(token: Token, task_id: uuid.UUID) -> bool:
    """Return whether the token may see the task, and the receipt log has it, but not the ledger."""
    receipt = await _find(token, task_id)
    return receipt is not None and receipt.level is not Level.REJECTED


def is_visible(receipt: Receipt, token: Token) -> bool:
    return receipt.principal == token.name or sees_all(token)


async def _find(token: Token, task_id: uuid.UUID) -> Receipt | None:
    """Return the receipt of a task that the ledger does not have. Raises if the log may have it and does not answer."""
    try:
        found = await receiving().find(task_id)
    except UnknownReceipt:
        return None
    return found if is_visible(found, token) else None


async def _find_without_ledger(token: Token, task_id: uuid.UUID) -> Receipt | None:
    try:
        async with asyncio.timeout(LOG_SECONDS):
            found = await status.find_claim(receiving().log, task_id)
    except (ReceiptLogUnreachable, TimeoutError):
        return None  # the answer is that the ledger is unreachable
    return found if found is not None and is_visible(found, token) else None


def _shown(receipt: Receipt) -> dict[str, str | None]:
    fields = receipt.fields()
    shown = {name: fields[name] for name in ("taskId", "level", "acceptedAt", "promisedBy")}
    if receipt.level is Level.ACCEPTED:
        return {**shown, "status": TaskStatus.QUEUED.value}
    rejected_at = utc(receipt.saved_at) if receipt.saved_at else None
    return {
        **shown,
        "status": None,
        "errorCode": receipt.code,
        "errorMessage": receipt.reason,
        "finishedAt": rejected_at,
    }
