"""Whether it is the worker that stops, or only a handler that says so.

A worker that is told to end interrupts its handler, whose task is given back unburned (P12). A handler that ends a
process by itself, as the `main()` of a command line does, has failed: it would be given back for ever, and take a child
of its worker with it each time.
"""

from __future__ import annotations

import signal
from typing import Final

from billiard.common import terminate_handler_fired  # type: ignore[attr-defined]
from celery.exceptions import WorkerTerminate

from tasks.core.outcomes import Verdict

LONGEST_CHAIN: Final = 10  # of errors that came of each other


class WorkerStops(SystemExit):
    """Raised into a handler by the signal that ends its worker."""


def what_stops(error: BaseException | None) -> BaseException | None:
    """What a signal has raised: this, or what its handler was interrupted by when it failed to clean up."""
    for _ in range(LONGEST_CHAIN):
        if error is None or isinstance(error, Verdict) or _is_of_a_signal(error):
            break
        error = error.__context__
    return error if error is not None and _is_of_a_signal(error) else None


def _is_of_a_signal(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):  # elsewhere than where Python itself raises it, nobody pressed a key
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, WorkerStops | WorkerTerminate) or (
        isinstance(error, SystemExit) and terminate_handler_fired()
    )
