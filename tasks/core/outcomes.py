"""What became of a task, as values; and the four words with which a handler says more than "done" or "failed".

    return value            Succeeded, with the value as the task's result
    raise Snooze(seconds)   not yet: again later, no attempt burned
    raise Discard(why)      not needed any more: final, and no failure
    raise Permanent(why)    will never work: DEAD at once
    raise TryLater(why, s)  a failure as any other, tried again after so many seconds at least
    anything else           Retry, or Dead with the last attempt
    (a worker that stops)   Released: another one runs it

`return Snooze(60)` means the same as raising it. `tasks/execution/settle.py` writes each of these down.

    return Finish(write, result)    of a handler outside a transaction: `write(db)` runs in the one that says SUCCEEDED
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.orm import Session

from models.errors import LeaseLost
from outbox.canonical import BadPayload, canonical_json

LAST_ERROR_LIMIT: Final = 4000
SENTENCE_LIMIT: Final = 500
LONGEST_SNOOZE_SECONDS: Final = 100 * 366 * 86_400


class ErrorCode(StrEnum):
    """Why a task failed, for programs."""

    HANDLER_ERROR = "handler_error"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    BAD_PAYLOAD = "bad_payload"
    BAD_RESULT = "bad_result"
    WORKER_LOST = "worker_lost"
    TRANSACTION_MISUSED = "transaction_misused"
    LEDGER_LOST = "ledger_lost"
    LEASE_LOST = "lease_lost"


class Verdict(Exception):
    """What a handler may raise or return instead of a result."""


class Snooze(Verdict):
    """Not yet: run it again after so many seconds. No attempt is burned."""

    def __init__(self, seconds: float) -> None:
        if not 0 <= seconds <= LONGEST_SNOOZE_SECONDS:
            raise ValueError("A snooze lasts from 0 seconds to a hundred years.")
        super().__init__(seconds)
        self.seconds = float(seconds)


class Discard(Verdict):
    """It is not needed any more: final, and no failure."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = str(why)


class Permanent(Verdict):
    """It will never work: DEAD at once, whatever attempts are left."""


class TryLater(Verdict):
    """It failed, and somebody said when to come back: an attempt is burned, and the next one is no sooner than that."""

    def __init__(self, why: str, seconds: float) -> None:
        if not 0 <= seconds <= LONGEST_SNOOZE_SECONDS:
            raise ValueError("A wait lasts from 0 seconds to a hundred years.")
        super().__init__(why)
        self.seconds = float(seconds)


@dataclass(frozen=True, slots=True)
class Finish:
    """What is left to do when the network has answered: rows that commit together with SUCCEEDED, or not at all."""

    write: Callable[[Session], object]
    result: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the ledger keeps it: for programs, for people, and for whoever mends it."""

    code: ErrorCode
    message: str  # one sentence
    trace: str  # the tail of the traceback

    @classmethod
    def of(cls, error: BaseException, code: ErrorCode = ErrorCode.HANDLER_ERROR) -> Failure:
        said = _said(error).strip().partition("\n")[0]
        sentence = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return cls(code, storable(sentence[:SENTENCE_LIMIT]), storable(_tail(error)))


@dataclass(frozen=True, slots=True)
class Succeeded:
    """With its result as JSON, or None."""

    written: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    failure: Failure
    least_seconds: float = 0.0  # until the next attempt, if that is more than the backoff


@dataclass(frozen=True, slots=True)
class Dead:
    failure: Failure


@dataclass(frozen=True, slots=True)
class Snoozed:
    seconds: float
    why: str = "snoozed"


@dataclass(frozen=True, slots=True)
class Discarded:
    why: str


@dataclass(frozen=True, slots=True)
class Released:
    """Given back unfinished, with no attempt burned."""

    why: str


@dataclass(frozen=True, slots=True)
class Isolated:
    """Lost together with others, and nobody knows whose fault it was: alone next time, and no attempt burned (P5)."""

    why: str


DONE: Final = Succeeded()  # with no result
Outcome = Succeeded | Retry | Dead | Snoozed | Discarded | Released | Isolated


def outcome_of_result(result: Any) -> Outcome:
    """What a handler returned. A result that cannot be stored is the task's failure, and never the batch's (P12)."""
    if isinstance(result, Verdict):
        return outcome_of(result)
    if result is None:
        return DONE
    try:
        return Succeeded(canonical_json(result, what="result"))
    except BadPayload as error:
        return Retry(Failure.of(error, ErrorCode.BAD_RESULT))


def outcome_of(error: BaseException) -> Outcome:
    """What an exception out of a handler means. Whatever is no verdict is a failure (P12)."""
    match error:
        case Snooze(seconds=seconds):
            return Snoozed(seconds)
        case Discard(why=why):
            return Discarded(storable(why[:SENTENCE_LIMIT]))
        case Permanent():
            return Dead(Failure.of(error, ErrorCode.PERMANENT))
        case TryLater(seconds=seconds):
            return Retry(Failure.of(error), seconds)
        case LeaseLost():  # where nobody has taken it over: as reclaim would have charged it, or it ran for ever (P5)
            return Retry(Failure.of(error, ErrorCode.LEASE_LOST))
        case _:
            return Retry(Failure.of(error))


def storable(text: str) -> str:
    """As PostgreSQL can hold it: no NUL, no half of a surrogate pair (P12)."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\N{REPLACEMENT CHARACTER}")


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"it cannot be shown ({type(another).__name__})"


def _tail(error: BaseException) -> str:
    """The end of a traceback says where it happened and what it was."""
    try:
        return "".join(traceback.format_exception(error))[-LAST_ERROR_LIMIT:]
    except Exception as another:  # an exception that lies about itself
        return f"{type(error).__name__}, whose traceback cannot be written: {type(another).__name__}"
