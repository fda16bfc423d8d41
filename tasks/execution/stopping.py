"""Distinguish a worker that stops from a handler that calls `sys.exit()`.

A worker that must stop at once (SIGTERM with `REMAP_SIGTERM=SIGQUIT`) raises an exception in its running handler, and
the task is released: this does not count as an attempt. Celery's child processes raise SystemExit. All others raise
WorkerStops, or Celery's WorkerTerminate.

A handler that raises SystemExit itself, as the `main()` of a command line does, has failed. If it were released, it
would run again for ever, and end a child process of its worker each time.
"""

from __future__ import annotations

import signal

from billiard.common import terminate_handler_fired  # type: ignore[attr-defined]
from celery.exceptions import WorkerTerminate

from models.ledger_outage import LONGEST_CHAIN
from tasks.core.outcomes import Verdict


class WorkerStops(WorkerTerminate):
    """Raised in a handler when its worker is told to stop, if no child process gets a signal: solo, threads, Kafka."""


def what_stops(error: BaseException | None) -> BaseException | None:
    """Return the exception that a signal raised, or None.

    It is `error` itself, or one of its contexts if the handler failed while it cleaned up after the signal.
    """
    for _ in range(LONGEST_CHAIN):
        if error is None or isinstance(error, Verdict) or _is_of_a_signal(error):
            break
        error = error.__context__
    return error if error is not None and _is_of_a_signal(error) else None


def _is_of_a_signal(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):  # only real if Python's own handler of SIGINT is in place
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, WorkerTerminate) or (isinstance(error, SystemExit) and terminate_handler_fired())
