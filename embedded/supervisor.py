"""The supervisor of a stack: starts its programs in order, restarts those that end, stops them in the opposite order.

The process that holds the lock of a home is its supervisor. Only the supervisor starts programs and writes pid files.
Stopping goes by pid file, so that the supervisor, `down`, and an `up` after a killed supervisor all stop the same way.
A program that ends is restarted after a pause that doubles each time, unless a drill holds it (`Home.hold`). A program
that does not become ready makes the whole start fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from child_process import ChildProcess, StartFailed, await_ready, kill_descendants
from embedded.errors import Interrupted
from embedded.home import Home
from embedded.program import Program
from embedded.shutdown import stop_programs
from embedded.signals import Signals
from embedded.stack import Stack

START_PATIENCE_SECONDS: Final = 60.0
LONGEST_PAUSE_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 60.0  # after this time a program counts as stable, and is restarted after a short pause

Report = Callable[[str], None]


class Supervisor:
    """Runs one stack: call `start`, then `watch` until a signal comes, then `stop`, which is safe at any time."""

    def __init__(self, home: Home, stack: Stack, report: Report, signals: Signals) -> None:
        self.home = home
        self.stack = stack
        self.report = report
        self.signals = signals
        self.running: dict[str, ChildProcess] = {}
        self._programs = {program.role: program for program in (*stack.servers, *stack.programs)}
        self._restart_at: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    def start(self, migrate: Callable[[], None]) -> None:
        """Start the servers, migrate the ledger, start the rest. Raise StartFailed or Interrupted."""
        self._start(self.stack.servers)
        for program in self.stack.servers:
            program.finish()
        self.home.write_stack(self.stack.addresses)
        migrate()
        self._start(self.stack.programs)

    def watch(self) -> None:
        """Restart programs that end, until a signal comes."""
        while not self.signals.count:
            self.restart_ended(time.monotonic())
            time.sleep(0.1)

    def stop(self) -> None:
        stop_programs(self.home, is_urgent=lambda: self.signals.count > 1)
        for child in self.running.values():
            if child.exit_code() is None:  # its pid file was lost
                child.kill()

    def restart_ended(self, now: float) -> None:
        for role, child in list(self.running.items()):
            code = child.exit_code()
            if code is None:
                continue
            if role not in self._restart_at:
                is_steady = now - self._started_at[role] > STEADY_SECONDS
                pause = 1.0 if is_steady else min(self._pauses.get(role, 0.5) * 2, LONGEST_PAUSE_SECONDS)
                self._pauses[role] = pause
                self._restart_at[role] = now + pause
                self.report(f"{role} ended with code {code}; restarting it in {pause:.0f} s")
                kill_descendants(self.home.ready_file(role))
            elif now >= self._restart_at[role] and not self.home.is_held(role):
                del self._restart_at[role]
                try:
                    self._launch(self._programs[role])
                except StartFailed as error:  # for example, the disk is full: try again later, keep the others running
                    self.report(error.message)
                    continue
                self.report(f"{role} restarted, pid {self.running[role].pid}")

    def _start(self, programs: list[Program]) -> None:
        for program in programs:
            self._raise_if_interrupted()
            self._launch(program)
        children = [self.running[program.role] for program in programs]
        await_ready(children, START_PATIENCE_SECONDS, check=self._raise_if_interrupted)

    def _launch(self, program: Program) -> None:
        try:
            self.running[program.role] = program.start(self.home)
        except OSError as error:
            raise StartFailed(f"{program.role} could not be started: {error.strerror or error}.") from None
        self._started_at[program.role] = time.monotonic()

    def _raise_if_interrupted(self) -> None:
        if self.signals.count:
            raise Interrupted
