"""Stops the parts of a stack in order, by their pid files, whoever started them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from embedded.home import Home
from embedded.part import end_remains
from embedded.process import Process
from embedded.roles import RANKS, STOP_SIGNALS

PATIENCE_SECONDS: Final = 15.0


def stop_parts(home: Home, *, hurry: Callable[[], bool] = lambda: False) -> list[str]:
    """Ask, wait, and kill what does not end. Returns the roles that ran."""
    stopped: list[str] = []
    for rank in RANKS:
        found = {role: process for role in rank if (process := Process.read(home.pid_file(role)))}
        alive = {role: process for role, process in found.items() if process.is_alive()}
        for role, process in alive.items():
            process.ask_to_end(STOP_SIGNALS.get(role, signal.SIGTERM))
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in alive.values():
            process.wait_or_kill(max(0.1, deadline - time.monotonic()), hurry=hurry)
        for role in rank:  # also where no pid file says so: the supervisor may have been killed before it wrote one
            end_remains(home, role)
            home.pid_file(role).unlink(missing_ok=True)
        stopped += alive
    home.forget_stack()
    return stopped
