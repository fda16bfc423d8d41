"""What all submitting routes share: the Idempotency-Key header, one transaction, and the receipt."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from starlette.requests import Request

import settings
from api.documented import Answer, Header
from api.json_responses import JsonResponse
from api.principals import owned_task, submit_for
from api.receiving import receiving, signed
from api.shapes import SignedReceipt, SubmittedTask
from api.tokens import Token
from models.engine import sessions
from models.errors import Misuse
from receipts.errors import EnvelopeTooLarge
from receipts.receipt import Receipt
from receipts.task_messages import message_of
from tasks.submission.envelope import NewTask
from tasks.submission.submit import Submitted

IDEMPOTENCY_KEY: Final = "idempotency-key"
# How the routes that submit are documented.
KEY_HEADER: Final = Header("Idempotency-Key", "With the same key nothing is submitted twice.", "invoice 17")
SUBMITTED: Final = {
    202: Answer("A new task, or its receipt if `receipt` was given.", SubmittedTask | SignedReceipt),
    200: Answer("The same was submitted before.", SubmittedTask | SignedReceipt),
}


def read_idempotency_key(request: Request) -> str | None:
    """Return the header's value as UTF-8, so that it equals the same key in a body; None if there is no header."""
    values = request.headers.getlist(IDEMPOTENCY_KEY)
    if not values:
        return None
    if len(values) > 1:
        raise Misuse("There is more than one Idempotency-Key header; send one.")
    try:
        return values[0].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Misuse("The Idempotency-Key is not UTF-8.") from None


def submit_and_commit(token: Token, new: NewTask, key: str | None) -> Submitted:
    """Submit a task in a transaction of its own."""
    with sessions().begin() as session:
        return submit_for(session, token, new, key=key)


class WantedReceipt(StrEnum):
    """The parameter `receipt` of a submitting route."""

    ACCEPTED = "accepted"  # as soon as the receipt log has it, even while PostgreSQL is slow or down
    SAVED = "saved"  # when it is in the ledger


async def submit_for_receipt(
    token: Token, raw: bytes, new: Callable[[], NewTask], key: str | None, wanted: WantedReceipt, *, kind: str
) -> JsonResponse:
    """Submit a task and answer with a signed receipt. `new` parses the body, after its length was checked."""
    if wanted is WantedReceipt.ACCEPTED and len(raw) > (limit := settings.current().receipt_max_bytes):
        raise EnvelopeTooLarge(f"The body has {len(raw):,} bytes; a receipt `accepted` allows {limit:,}.")
    given = new()
    owned = owned_task(token, given, key=key)
    message = message_of(owned, principal=token.name, client_id=given.key if key is None else key, kind=kind)
    if wanted is WantedReceipt.ACCEPTED:
        return receipt_response(await receiving().task(message, owned))
    return receipt_response(await receiving().save_task(message, owned, ordered=True))


def receipt_response(given: Receipt) -> JsonResponse:
    """Answer 202 for a new message and 200 for one that is known."""
    headers = {"Location": f"/api/receipts/{given.id}"}
    return JsonResponse(signed(given), 200 if given.duplicate else 202, headers)


def answer_submitted(submitted: Submitted, *, location: str = "/api/tasks/") -> JsonResponse:
    """Answer 202 for a new task and 200 for one that existed before."""
    content = {"taskId": submitted.task_id, "status": submitted.status, "created": submitted.created}
    return JsonResponse(content, 202 if submitted.created else 200, {"Location": f"{location}{submitted.task_id}"})
