"""Outcomes of a task as values, and the exceptions with which a handler chooses its outcome.

    return value            Succeeded, with the value as the task's result
    raise Snooze(seconds)   run again later; this does not count as an attempt
    raise Discard(why)      no longer needed: final, but not a failure
    raise Permanent(why)    can never succeed: DEAD at once
    raise TryLater(why, s)  a failure like any other, retried after s seconds at the earliest
    any other exception     Retry, or Dead after the last attempt

`return Snooze(60)` means the same as raising it. `tasks/execution/decision.py` has the whole table of what leads to
which outcome, and `tasks/execution/settle.py` writes the outcomes to the ledger.

    return Finish(write, result)    from a handler outside a transaction: `write(db)` commits together with SUCCEEDED
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.orm import Session

from models.driver_values import storable

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
    """Run the task again after some seconds. This does not count as an attempt."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = _check_delay(seconds)


class Discard(Verdict):
    """The task is no longer needed: it ends as DISCARDED, which is not a failure."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = str(why)


class Permanent(Verdict):
    """The task can never succeed: it is DEAD at once, however many attempts are left."""


class TryLater(Verdict):
    """The task failed and must not be retried for some seconds. This counts as an attempt."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = _check_delay(seconds)


def _check_delay(seconds: float) -> float:
    if not 0 <= seconds <= LONGEST_SNOOZE_SECONDS:
        raise ValueError("The seconds must be between 0 and a hundred years.")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class Finish:
    """What a handler outside a transaction writes at its end: `write(db)` runs in the transaction of SUCCEEDED."""

    write: Callable[[Session], object]
    result: Any = None


class Raised:
    """The exception of a failed attempt, for the log and for receivers of signals. The ledger stores its text only.

    `drop` forgets it. Otherwise the exception would keep every variable of the handler alive: its traceback refers to
    the frames of the handler, and one of our own frames refers to the outcome.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def drop(self) -> None:
        self.error = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the ledger stores it: a code for programs, a sentence for users, a traceback for developers."""

    code: ErrorCode
    message: str
    trace: str  # its last characters
    raised: Raised = field(default_factory=lambda: Raised(None), compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException, code: ErrorCode = ErrorCode.HANDLER_ERROR) -> Failure:
        """Describe an exception; even one that cannot be converted to text."""
        name = type(error).__name__
        try:
            message = str(error).strip().partition("\n")[0]
        except Exception as another:
            message = f"its text cannot be shown ({type(another).__name__})"
        try:
            trace = "".join(traceback.format_exception(error))[-LAST_ERROR_LIMIT:]
        except Exception as another:
            trace = f"{name}: its traceback cannot be shown ({type(another).__name__})"
        sentence = f"{name}: {message}" if message else name
        return cls(code, storable(sentence[:SENTENCE_LIMIT]), storable(trace), Raised(error))


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned; `written` is its result as JSON, or None."""

    written: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed. After the last attempt this becomes DEAD."""

    failure: Failure
    least_seconds: float = 0.0  # until the next attempt, if the backoff is shorter


@dataclass(frozen=True, slots=True)
class Dead:
    """The task failed and is not retried."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The task runs again later. This does not count as an attempt."""

    seconds: float
    why: str = "snoozed"


@dataclass(frozen=True, slots=True)
class Discarded:
    """The task is no longer needed."""

    why: str


@dataclass(frozen=True, slots=True)
class Released:
    """The task is returned unfinished. This does not count as an attempt."""

    why: str


@dataclass(frozen=True, slots=True)
class Isolated:
    """The task ran in a batch that was lost, and the culprit is unknown. It runs alone next time.

    This does not count as an attempt. See docs/protocol.md, Poison.
    """

    why: str


DONE: Final = Succeeded()  # without a result
Outcome = Succeeded | Retry | Dead | Snoozed | Discarded | Released | Isolated
