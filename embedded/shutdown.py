"""Stop the programs of a stack, in order, by their pid files."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from child_process import OwnProcess, kill_descendants
from embedded.home import Home
from embedded.roles import STOP_ORDER, STOP_SIGNALS

PATIENCE_SECONDS: Final = 15.0


def stop_programs(home: Home, *, is_urgent: Callable[[], bool] = lambda: False) -> list[str]:
    """Ask each program to end, and kill those that do not end in time. Return the roles that were running."""
    stopped: list[str] = []
    for roles in STOP_ORDER:
        found = {role: process for role in roles if (process := OwnProcess.read(home.pid_file(role)))}
        alive = {role: process for role, process in found.items() if process.is_alive()}
        for role, process in alive.items():
            process.send_signal(STOP_SIGNALS.get(role, signal.SIGTERM))
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in alive.values():
            process.wait_or_kill(max(0.1, deadline - time.monotonic()), is_urgent=is_urgent)
        for role in roles:  # also without a pid file: a killed supervisor may not have written it yet
            kill_descendants(home.ready_file(role))
            home.pid_file(role).unlink(missing_ok=True)
        stopped += alive
    home.forget_stack()
    return stopped
