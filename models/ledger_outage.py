"""Wait for a ledger that is unreachable. How long to pause, when to give up and what to log is decided here only.

An outage of PostgreSQL costs time and never work (docs/protocol.md, Outages). A worker that has something to claim, to
settle or to renew calls `wait_for_ledger` with it. While PostgreSQL does not answer, the call is repeated with growing
pauses, without end unless the caller gives a limit. The call may have taken effect although its answer was lost, so it
must be safe to repeat: settling names a token and finds nothing left to do, a repeated claim first releases the one
before it, and a second wake-up is harmless.

Outside a handler's transaction, `asks_to_repeat` and `is_outage` are the only questions that are asked about a database
error. Inside one, `execution/decision.py` looks at the state of the connection.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolIsEmpty

import metrics
from models.errors import Unreachable

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 1.0  # so that work goes on within about a second after the outage
REPETITIONS: Final = 5  # of a transaction that the database asks to repeat, without a pause
LONGEST_CHAIN: Final = 10  # how many causes of an error are followed

_REPEAT: Final = {
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "26000",  # invalid_sql_statement_name: the server no longer has our prepared statement
}
_OUTAGE: Final = {
    "25006",  # read_only_sql_transaction: a standby, or a primary that an operator has closed for writes
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
}


def asks_to_repeat(error: BaseException | None) -> bool:
    """Return True if the same transaction may succeed when it is repeated, also if a handler has wrapped the error."""
    for _ in range(LONGEST_CHAIN):
        if _sqlstate(error) in _REPEAT:
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def is_outage(error: BaseException) -> bool:
    """Return True if the ledger did not answer, or cannot take writes at the moment."""
    if isinstance(error, Unreachable | PoolIsEmpty):  # an empty pool: other threads have all connections
        return True
    return isinstance(error, DBAPIError) and (error.connection_invalidated or _sqlstate(error) in _OUTAGE)


def wait_for_ledger(
    work: Callable[[], Answer], *, seconds: float = math.inf, pause: Callable[[float], object] = time.sleep
) -> Answer:
    """Call `work` until the ledger answers, for at most `seconds`, and return what it returns.

    A transaction that the database asks to repeat is repeated at once, a few times. Any other error is raised. `pause`
    is called between two calls; it may raise to end the waiting.
    """
    give_up_at = time.monotonic() + seconds
    repetitions = 0
    pauses = _pauses()
    while True:
        try:
            answer = work()
        except Exception as error:
            if asks_to_repeat(error) and repetitions < REPETITIONS:
                repetitions += 1
                continue
            if not is_outage(error):
                raise
            outage.note_failure(error)
            length = next(pauses)
            if time.monotonic() + length > give_up_at:
                raise
            pause(length)
        else:
            outage.note_answer()
            return answer


@contextmanager
def skipped_in_outage() -> Iterator[None]:
    """Run a block that is repeated later in any case: report an outage of the ledger once, and do not raise it."""
    try:
        yield
    except Exception as error:
        if not is_outage(error):
            raise
        outage.note_failure(error)
    else:
        outage.note_answer()


def _pauses() -> Iterator[float]:
    length = FIRST_PAUSE_SECONDS
    while True:
        yield length
        length = min(2 * length, LONGEST_PAUSE_SECONDS)


def _sqlstate(error: BaseException | None) -> str | None:
    return getattr(error.orig if isinstance(error, DBAPIError) else error, "pgcode", None)  # or psycopg2's own error


class Outage:
    """Report that this process waits for the ledger: one log line and one gauge for all of its threads."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Return True if the last call of this process got no answer."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Return for how long this process has had no answer."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def note_failure(self, error: BaseException) -> None:
        with self._lock:
            if self._since is not None:
                return
            self._since = time.monotonic()
        metrics.LEDGER_UNREACHABLE.set(1)
        logger.warning(
            "The ledger is unreachable; this process waits for it: %s",
            str(error).partition("\n")[0],
            extra={"event": "ledger_down"},
        )

    def note_answer(self) -> None:
        if self._since is None:
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            metrics.LEDGER_UNREACHABLE.set(0)
            logger.warning(
                "The ledger answers again, after %.1f s.", time.monotonic() - since, extra={"event": "ledger_up"}
            )


outage: Final = Outage()
