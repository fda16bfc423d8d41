"""How often a process asks the ledger for news while requests or threads wait for some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.5


@dataclass(slots=True)
class PollPace:
    """The pause before the next question: short after news or a new waiter, longer and longer without."""

    seconds: float = FIRST_PAUSE_SECONDS

    def hurry(self) -> None:
        self.seconds = FIRST_PAUSE_SECONDS

    def slow_down(self) -> None:
        self.seconds = min(self.seconds * 1.5, LONGEST_PAUSE_SECONDS)
