"""Whether it is the worker that stops, or only a handler that says so.

A worker that is told to end interrupts its handler, whose task is given back unburned (P12). A handler that ends a
process by itself, as the `main()` of a command line does, has failed: it would be given back for ever, and take a child
of its worker with it each time.
"""

from __future__ import annotations

import signal

from billiard.common import terminate_handler_fired  # type: ignore[attr-defined]


class WorkerStops(SystemExit):
    """Raised into a handler by the signal that ends its worker."""


def is_worker_stopping(error: BaseException) -> bool:
    """Whoever raised it: a signal, or the handler."""
    if isinstance(error, KeyboardInterrupt):  # elsewhere than where Python itself raises it, nobody pressed a key
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, WorkerStops) or (isinstance(error, SystemExit) and terminate_handler_fired())
