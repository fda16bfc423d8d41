"""Check a receipt that was pasted: the signature, what it promises, and what became of the message, in sentences."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import settings
from console.door import PREFIX
from console.formats import distance, duration, moment
from models.errors import CeleriacError
from models.receipts import Level
from models.status import TaskStatus
from receipts.custody import Custody, read_custody
from receipts.key_list import Key
from receipts.keys import KeyFolder
from receipts.receipt import AOF_ALWAYS, COMMIT, Receipt
from receipts.signing import NotAReceipt, NotGenuine, UnknownReceiptKey, parse_receipts, verify

LONGEST: Final = 20_000  # characters
ANSWER_SECONDS: Final = 1.0  # patience with the receipt log
OK: Final = "ok"
WARN: Final = "warn"
BAD: Final = "bad"
OFF: Final = "off"
POLICIES: Final = {
    AOF_ALWAYS: "on the disk of the receipt log (appendonly, fsync always)",
    COMMIT: "committed by PostgreSQL",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was checked. `mark` is ok, warn, bad or off."""

    mark: str
    title: str
    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdict about a receipt, and its reasons."""

    mark: str
    verdict: str
    lines: list[Line]


def check(text: str, folder: KeyFolder) -> Checked:
    """Check one receipt. Whatever is wrong with it is part of the verdict."""
    keys = {key.key_id: key for key in folder.list_keys()}
    try:
        receipt = _parse(text)
        verify(receipt, {key_id: key.public for key_id, key in keys.items()})
    except NotAReceipt as error:
        return _refused("This is not a receipt.", "Text", error)
    except UnknownReceiptKey as error:
        return _refused("This receipt cannot be verified here: its key is unknown.", "Signature", error)
    except NotGenuine as error:
        return _refused("This receipt is not genuine.", "Signature", error)
    key = keys[str(receipt["keyId"])]
    return _conclude([_signature(key, folder.state_of(key)), _level(receipt), *_look_up(receipt)])


def _conclude(lines: list[Line]) -> Checked:
    """Return the verdict about a receipt with a valid signature."""
    marks = {line.mark for line in lines}
    if BAD in marks:
        return Checked(BAD, "The signature is valid, but the promise was not kept or the records disagree.", lines)
    if WARN in marks:
        return Checked(WARN, "The signature is valid. Look at what is marked.", lines)
    return Checked(OK, "This receipt is valid, and the records agree with it.", lines)


def _refused(verdict: str, title: str, error: CeleriacError) -> Checked:
    return Checked(BAD, verdict, [Line(BAD, title, f"{error.message} {error.remedy}")])


def _parse(text: str) -> Mapping[str, Any]:
    if len(text) > LONGEST:
        raise NotAReceipt(f"It has more than {LONGEST:,} characters; no receipt is that long.")
    found = parse_receipts(text.encode(errors="surrogatepass"))
    if len(found) != 1:
        raise NotAReceipt("Paste one receipt at a time." if found else "There is no receipt in it.")
    (receipt,) = found
    if isinstance(receipt, NotAReceipt):
        raise receipt
    if not isinstance(receipt, Mapping):
        raise NotAReceipt("A receipt must be a JSON object.")
    return receipt


def _signature(key: Key, state: str) -> Line:
    words = {
        "signing": "which signs now",
        "superseded": "which was replaced by a newer one",
        "retired": "which is retired; its receipts stay valid",
        "scheduled": "which signs later: the clock of the signer was wrong, or the key was rescheduled",
    }
    told = words.get(state, f"whose state is: {state}")
    return Line(OK, "Signature", f"Valid. The key {key.key_id}, {told}, has signed exactly these fields.")


def _level(receipt: Mapping[str, Any]) -> Line:
    name = receipt.get("clientId")
    whose = f" of the client's id {name!r}" if name else ""
    again = " It was submitted before." if receipt.get("duplicate") else ""
    match receipt["level"]:
        case Level.ACCEPTED:
            how = POLICIES.get(str(receipt.get("policy")), str(receipt.get("policy")))
            promise = f"to be saved or rejected by {_time(receipt, 'promisedBy')}"
            text = f"Accepted at {_time(receipt, 'acceptedAt')}: the message{whose} was {how}, {promise}."
        case Level.SAVED:
            number = f"number {receipt.get('ledgerSeq')} in the ledger"
            text = f"Saved at {_time(receipt, 'savedAt')}: the message{whose} is {number}."
        case _:
            reason = f"{receipt.get('reason')} ({receipt.get('code')})"
            text = f"Rejected at {_time(receipt, 'rejectedAt')}: the message{whose} can never be saved: {reason}."
    order = "" if receipt.get("ordered", True) else " It may have overtaken earlier messages of its sender."
    return Line(OK, f"Level {receipt['level']}", f"{text}{again}{order}")


def _look_up(receipt: Mapping[str, Any]) -> Iterator[Line]:
    try:
        id_ = uuid.UUID(str(receipt.get("id")))
    except ValueError:
        yield Line(WARN, "Custody", "It names no message of this installation, so nothing can be looked up.")
        return
    custody = read_custody(id_, answer_seconds=ANSWER_SECONDS)
    ending = custody.ending_of(receipt["level"], receipt.get("sha256"))
    if ending is None:
        yield _not_in_ledger(receipt, custody)
        return
    yield _in_ledger(receipt, ending)
    if ending.sha256 != receipt.get("sha256"):
        return
    if (promised_by := _parse_time(receipt.get("promisedBy"))) and ending.saved_at:
        yield _promise(promised_by, ending.saved_at, ending.level)
    if ending.level is Level.SAVED:
        yield _task(ending, custody)
    elif custody.saved is not None:
        what = "The same message" if custody.saved.sha256 == ending.sha256 else "Another payload"
        yield Line(OFF, "Saved as well", f"{what} was saved under this id, as number {custody.saved.ledger_seq}.")
        yield _task(custody.saved, custody)


def _not_in_ledger(receipt: Mapping[str, Any], custody: Custody) -> Line:
    if receipt["level"] != Level.ACCEPTED:
        return _gone(receipt, custody, "The ledger does not have it")
    if not custody.log_answers:
        text = "The ledger does not have it, and the receipt log, which may have it, does not answer. Try again."
        return Line(WARN, "Not known", text)
    if custody.claim is None:
        return _gone(receipt, custody, "Neither the ledger nor the receipt log has it")
    if custody.claim.sha256 != receipt.get("sha256"):
        return Line(BAD, "Receipt log", "The receipt log has another payload under this id.")
    if custody.claim.level is not Level.ACCEPTED:
        said = f"The receipt log says that it was {custody.claim.level}, and the ledger does not have it"
        return _gone(receipt, custody, said)
    return _waits(_parse_time(receipt.get("promisedBy")), custody.at)


def _waits(promised_by: datetime | None, at: datetime) -> Line:
    """Return the line about a message that is in the receipt log only."""
    if promised_by is not None and promised_by < at:
        text = f"The promise is missed: its time was over {distance(promised_by, at)}, and it waits in the receipt log."
        return Line(BAD, "Waits to be saved", text, f"{PREFIX}/receipts#shards-title")
    until = f", and will be saved or rejected {distance(promised_by, at)} at the latest" if promised_by else ""
    return Line(OK, "Waits to be saved", f"It waits in the receipt log, as promised{until}.")


def _gone(receipt: Mapping[str, Any], custody: Custody, what: str) -> Line:
    """Explain that a message is nowhere: after its retention that is usual, before it is a loss."""
    hours = settings.current().receipt_retention_hours
    accepted_at = _parse_time(receipt.get("acceptedAt"))
    if accepted_at is not None and custody.at - accepted_at > timedelta(hours=hours):
        return Line(OFF, "Pruned", f"{what}. Receipts are kept for {hours:,} hours, and this one is older.")
    why = "The message was lost, or a server was restored from an older backup."
    return Line(BAD, "Missing", f"{what}, although receipts are kept for {hours:,} hours. {why}")


def _in_ledger(receipt: Mapping[str, Any], ending: Receipt) -> Line:
    number, title = ending.ledger_seq, "Saved" if ending.level is Level.SAVED else "Rejected"
    if ending.sha256 != receipt.get("sha256"):
        return Line(BAD, title, f"The ledger has another payload under this id, as number {number}.")
    if receipt["level"] not in (Level.ACCEPTED, ending.level):
        return Line(BAD, title, f"The ledger says {ending.level}, and the receipt says {receipt['level']}.")
    if receipt["level"] == ending.level and receipt.get("ledgerSeq") != number:
        text = f"The ledger has it as number {number}, and the receipt says {receipt.get('ledgerSeq')}."
        return Line(BAD, title, text)
    at = moment(ending.saved_at) if ending.saved_at else "?"
    if ending.level is Level.REJECTED:
        mark = OK if receipt["level"] == ending.level else WARN
        return Line(mark, title, f"At {at} as number {number}: {ending.reason} ({ending.code}).")
    return Line(OK, title, f"At {at} as number {number} in the ledger, with the same payload.")


def _promise(promised_by: datetime, ended_at: datetime, level: Level) -> Line:
    if ended_at <= promised_by:
        return Line(OK, "Promise", f"Kept: it was {level} {duration(promised_by - ended_at)} before its time was over.")
    return Line(BAD, "Promise", f"Missed: it was {level} {duration(ended_at - promised_by)} later than promised.")


def _task(ending: Receipt, custody: Custody) -> Line:
    if ending.kind == "chat":
        return Line(OK, "Message", "It is a message of a chat, which is complete when it is saved.")
    if custody.task is None:
        return Line(OFF, "Task", "Its task is no longer in the ledger: final tasks are pruned after their retention.")
    task = custody.task
    mark = WARN if task.status is TaskStatus.DEAD else OFF if task.status is TaskStatus.DISCARDED else OK
    return Line(mark, "Task", f"{task.type} is {task.status.lower()}.", f"{PREFIX}/tasks/{task.id}")


def _time(receipt: Mapping[str, Any], name: str) -> str:
    at = _parse_time(receipt.get(name))
    return moment(at) if at else str(receipt.get(name))


def _parse_time(given: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(given)
    except (TypeError, ValueError):
        return None
    return at.astimezone(UTC) if at.tzinfo else None
