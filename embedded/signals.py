"""Signals to a supervisor, counted: the first asks for an orderly stop, a second one for a quick one."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Final

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts while it is entered. A signal that was ignored before (`nohup`) stays ignored."""

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
