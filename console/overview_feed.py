"""The figures of the overview, read once a second for all browsers of this process, and only while one looks.

A page, and each step of a stream, takes the latest snapshot. It is read again if it is older than READ_SECONDS, by the
first that asks; all others wait for the same answer. If the ledger does not answer, the snapshot before stays, and says
so. Parts of pages are rendered once for each snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakKeyDictionary

from api.ledger_calls import call_ledger
from api.tokens import Token
from console import sessions
from console.history import History, Period, read_history
from console.overview_figures import Figures, read_accepted, read_figures
from console.visitors import Visitor
from models.engine import engine
from tasks.operations.inserted_rows import Inserted

logger = logging.getLogger(__name__)

READ_SECONDS: Final = 1.0
HISTORY_SECONDS: Final = 5.0  # the tally is folded as often
PACE_SECONDS: Final = 60.0
SHORTEST_SECONDS: Final = 0.5  # between two moments that are compared


@dataclass(frozen=True, slots=True)
class Arrivals:
    """New tasks and receipts per second in the last minute; None until two moments can be compared."""

    tasks: float | None = None
    receipts: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all browsers see until the next one."""

    figures: Figures
    arrivals: Arrivals
    is_old: bool = False  # the ledger has not answered since
    parts: dict[object, dict[str, str]] = field(default_factory=dict)  # that were rendered, by what they depend on

    def rendered(self, key: object, render: Callable[[], dict[str, str]]) -> dict[str, str]:
        if key not in self.parts:
            self.parts[key] = render()
        return self.parts[key]


class OverviewFeed:
    """One per event loop."""

    def __init__(self) -> None:
        self.reads = 0
        self._watching: dict[object, str] = {}  # the session of each open stream
        self._checked: set[str] = set()  # sessions that the last read has checked, and the tokens of the valid ones
        self._tokens: dict[str, Token] = {}
        self._snapshot: Snapshot | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._history: dict[Period, tuple[float, History]] = {}
        self._inserted: deque[tuple[float, Inserted]] = deque()
        self._is_failing = False

    @property
    def streams(self) -> int:
        return len(self._watching)

    @contextmanager
    def watch(self, session: str) -> Iterator[None]:
        """Let the next reads check this session, too."""
        key = object()
        self._watching[key] = session
        try:
            yield
        finally:
            del self._watching[key]

    def token_of(self, visitor: Visitor) -> Token | None:
        """Return the token of a watched session as of the last read; None if the session has ended."""
        return self._tokens.get(visitor.session) if visitor.session in self._checked else visitor.token

    async def snapshot(self) -> Snapshot:
        """Return the latest figures. Raises if the ledger does not answer and never did."""
        async with self._reading:
            if time.monotonic() - self._read_at >= READ_SECONDS:
                await self._read()
        assert self._snapshot is not None
        return self._snapshot

    async def history(self, period: Period) -> History:
        """Return the latest history of a period."""
        async with self._reading:
            read_at, found = self._history.get(period, (float("-inf"), None))
            if found is None or (time.monotonic() - read_at >= HISTORY_SECONDS and not self._is_failing):
                try:
                    found = await call_ledger(lambda: read_history(period))
                except Exception:
                    if found is None:
                        raise
                self._history[period] = time.monotonic(), found
        return found

    async def _read(self) -> None:
        watched = set(self._watching.values())
        try:
            (figures, tokens), accepted = await asyncio.gather(
                call_ledger(lambda: (read_figures(), _read_tokens(watched))), call_ledger(read_accepted)
            )
        except Exception as error:
            if self._snapshot is None:
                raise
            if not self._is_failing:  # one line for each outage
                logger.warning("The overview cannot be read: %s", error, extra={"event": "overview_not_read"})
            self._is_failing = True
            self._snapshot = replace(self._snapshot, is_old=True, parts={})
        else:
            self._is_failing = False
            self._checked, self._tokens = watched, tokens
            self._snapshot = Snapshot(replace(figures, accepted=accepted), self._arrivals(figures.inserted))
        self.reads += 1
        self._read_at = time.monotonic()

    def _arrivals(self, inserted: Inserted) -> Arrivals:
        at = time.monotonic()
        while len(self._inserted) > 1 and self._inserted[1][0] <= at - PACE_SECONDS:
            self._inserted.popleft()
        since, before = self._inserted[0] if self._inserted else (at, inserted)
        self._inserted.append((at, inserted))
        if at - since < SHORTEST_SECONDS or inserted.tasks < before.tasks or inserted.receipts < before.receipts:
            return Arrivals()
        seconds = at - since
        return Arrivals((inserted.tasks - before.tasks) / seconds, (inserted.receipts - before.receipts) / seconds)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, OverviewFeed] = WeakKeyDictionary()


def overview_feed() -> OverviewFeed:
    """Return the feed of this event loop."""
    return _by_loop.setdefault(asyncio.get_running_loop(), OverviewFeed())


def _read_tokens(watched: set[str]) -> dict[str, Token]:
    with engine().connect() as connection:
        return sessions.find_sessions(connection, watched)
