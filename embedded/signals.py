"""Count the signals that ask a supervisor to stop: the first one stops it in order, a second one at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Final

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager that counts signals. A signal that was ignored before (`nohup`) stays ignored."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
