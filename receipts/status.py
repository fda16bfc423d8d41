"""How far a message is: look in Redis first, then in the ledger. An accepted message is never called unknown.

Redis          ledger         answer
has a claim    (not asked)    what the claim says; only if it says `rejected`, the ledger is asked as well, because
                              another payload under the same id may have been saved
no claim       has a receipt  what the receipt says
no claim       no receipt     UnknownReceipt
no claim       down           Unreachable: the ledger may know it
down           has a receipt  what the receipt says
down           no receipt     ReceiptLogUnreachable: Redis may know it, unless nothing was ever accepted
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from models.engine import engine
from models.receipts import Level
from receipts import kinds, rows
from receipts.errors import ReceiptLogUnreachable, UnknownReceipt
from receipts.log import ReceiptLog
from receipts.receipt import Receipt, from_milliseconds
from receipts.switches import read_switches


@dataclass(frozen=True, slots=True)
class InLedger:
    """What the ledger knows about a message, and whether Redis may know more."""

    receipt: Receipt | None
    was_two_phase: bool


async def find_receipt(
    log: ReceiptLog, read_ledger: Callable[[uuid.UUID], Awaitable[InLedger]], id_: uuid.UUID
) -> Receipt:
    """Return the receipt of a message; raise UnknownReceipt, or which server had to be asked and did not answer."""
    unreachable: ReceiptLogUnreachable | None = None
    claim: Receipt | None = None
    try:
        claim = await find_claim(log, id_)
    except ReceiptLogUnreachable as error:
        unreachable = error
    if claim is not None and claim.level is not Level.REJECTED:
        return claim
    try:
        found = await read_ledger(id_)
    except Exception:
        if claim is not None:
            return claim
        raise
    if receipt := found.receipt or claim:
        return receipt
    if unreachable is not None and found.was_two_phase:
        raise unreachable
    raise UnknownReceipt(f"There is no receipt {id_}.")


async def find_claim(log: ReceiptLog, id_: uuid.UUID) -> Receipt | None:
    """Return the receipt that Redis has, or None."""
    claim = await log.call("hgetall", kinds.claim_key(id_))
    return receipt_of_claim(id_, claim) if claim else None


def read_ledger(id_: uuid.UUID) -> InLedger:
    """Return what the ledger knows. Blocks; the API calls it in a thread."""
    with engine().connect() as connection:
        receipt = rows.find(connection, id_)
        return InLedger(receipt, receipt is not None or read_switches(connection).was_two_phase)


def receipt_of_claim(id_: uuid.UUID, claim: Mapping[str, str]) -> Receipt:
    """Return the receipt that a claim in Redis describes."""
    saved_at = claim.get("savedAt")
    return Receipt(
        Level(claim["level"]),
        id_,
        claim["kind"],
        claim["principal"],
        claim["sha"],
        from_milliseconds(claim["at"]),
        from_milliseconds(claim["promise"]),
        claim.get("client") or None,
        saved_at=from_milliseconds(saved_at) if saved_at else None,
        ledger_seq=int(claim["seq"]) if claim.get("seq") else None,
        code=claim.get("code") or None,
        reason=claim.get("reason") or None,
        task_id=uuid.UUID(claim["task"]) if claim.get("task") else None,
    )
