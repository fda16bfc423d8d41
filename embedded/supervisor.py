"""Starts the parts of a stack in order, keeps them running, stops them in the opposite order.

The supervisor of a home is whoever holds its lock. It alone starts parts and writes pid files; everybody stops by pid
file, so that `down`, and a later `up` after the supervisor was killed, do the same as the supervisor itself. A part
that ends is started again after a wait that doubles; a part that never becomes ready stops the whole start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from embedded.errors import Interrupted, StartFailed
from embedded.home import Home
from embedded.part import Part, Running, end_remains
from embedded.signals import Signals
from embedded.stack import Stack
from embedded.stop_parts import stop_parts

START_PATIENCE_SECONDS: Final = 60.0
LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 60.0

Tell = Callable[[str], None]


class Supervisor:
    """Runs one stack. Call `start`, then `watch` until a signal comes; `stop` is safe at any point."""

    def __init__(self, home: Home, stack: Stack, tell: Tell, signals: Signals) -> None:
        self.home = home
        self.stack = stack
        self.tell = tell
        self.running: dict[str, Running] = {}
        self.signals = signals
        self._restart_at: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._waits: dict[str, float] = {}

    def start(self, migrate: Callable[[], None]) -> None:
        for part in self.stack.servers:
            self._launch(part)
        self._await_ready(self.stack.servers)
        for part in self.stack.servers:
            part.finish()
        self.home.write_stack(self.stack.addresses)
        migrate()
        for part in self.stack.parts:
            self._launch(part)
        self._await_ready(self.stack.parts)

    def watch(self) -> None:
        """Until a signal comes: start again what ended."""
        while not self.signals.count:
            self._start_again_what_ended(time.monotonic())
            time.sleep(0.1)

    def stop(self) -> None:
        stop_parts(self.home, hurry=lambda: self.signals.count > 1)
        for running in self.running.values():
            if running.exit_code() is None:  # its pid file was lost
                running.process.kill()
                running.popen.wait()

    def _launch(self, part: Part) -> None:
        if self.signals.count:
            raise Interrupted
        try:
            self.running[part.role] = Running(self.home, part)
        except OSError as error:
            raise StartFailed(f"{part.role} could not be started: {error.strerror or error}.") from None
        self._started_at[part.role] = time.monotonic()

    def _await_ready(self, parts: list[Part]) -> None:
        waiting = {part.role: self.running[part.role] for part in parts}
        deadline = time.monotonic() + START_PATIENCE_SECONDS
        while waiting:
            for role, running in list(waiting.items()):
                if self.signals.count:
                    raise Interrupted
                if running.exit_code() is not None:
                    raise StartFailed(f"{role} ended with code {running.exit_code()}:\n{running.last_words()}")
                if running.is_ready():
                    del waiting[role]
                elif time.monotonic() > deadline:
                    raise StartFailed(
                        f"{role} was not ready after {START_PATIENCE_SECONDS:.0f} s:\n{running.last_words()}"
                    )
            time.sleep(0.05)

    def _start_again_what_ended(self, now: float) -> None:
        for role, running in list(self.running.items()):
            code = running.exit_code()
            if code is None:
                continue
            if role not in self._restart_at:
                steady = now - self._started_at[role] > STEADY_SECONDS
                wait = 1.0 if steady else min(self._waits.get(role, 0.5) * 2, LONGEST_WAIT_SECONDS)
                self._waits[role] = wait
                self._restart_at[role] = now + wait
                self.tell(f"{role} ended with code {code}; starting it again in {wait:.0f} s")
                end_remains(self.home, role)
            elif now >= self._restart_at[role]:
                del self._restart_at[role]
                try:
                    self._launch(running.part)
                except StartFailed as error:  # a full disk, say: one part waits, the others go on
                    self.tell(error.message)
                    continue
                self.tell(f"{role} started again, pid {self.running[role].process.pid}")
