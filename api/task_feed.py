"""What happens to tasks that requests wait for or follow: one statement of the process for all of them.

A `Watcher` follows one task from a position in its history (the id of a transition). While there are watchers, the feed
asks the ledger again and again for what is new: soon after a watcher came or something happened, less and less often
while nothing does. A watcher whose request has not taken its transitions yet is left out, so each holds at most one
page of them, however slow its client is.

While the ledger is unreachable, watchers get nothing, and afterwards everything since their position.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from weakref import WeakKeyDictionary

from api.ledger_calls import call_ledger
from models.engine import engine
from tasks.operations.new_transitions import read_new_transitions
from tasks.operations.poll_pace import FIRST_PAUSE_SECONDS, PollPace
from tasks.operations.task_details import Transition

logger = logging.getLogger(__name__)


class Watcher:
    """Follows one task."""

    def __init__(self, task_id: uuid.UUID, position: int) -> None:
        self.task_id = task_id
        self.position = position
        self._found: list[Transition] = []
        self._arrived = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return not self._found

    async def take(self, seconds: float) -> list[Transition]:
        """Return the next transitions, oldest first, or nothing if there are none within these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        found, self._found = self._found, []
        self._arrived.clear()
        return found

    def give(self, transition: Transition) -> None:
        if transition.id > self.position:
            self.position = transition.id
            self._found.append(transition)
            self._arrived.set()


class TaskFeed:
    """One per event loop."""

    def __init__(self) -> None:
        self.watchers: set[Watcher] = set()
        self._is_wanted = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._is_failing = False

    @contextmanager
    def watch(self, task_id: uuid.UUID, *, after: int = 0) -> Iterator[Watcher]:
        """Follow a task from the transition after this one."""
        watcher = Watcher(task_id, after)
        self.watchers.add(watcher)
        self._is_wanted.set()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_on())
        try:
            yield watcher
        finally:
            self.watchers.discard(watcher)

    async def _read_on(self) -> None:
        pace = PollPace()
        while self.watchers:
            self._is_wanted.clear()
            if await self._read():
                pace.hurry()
            await asyncio.sleep(FIRST_PAUSE_SECONDS)  # so that watchers that come together share a statement
            try:
                async with asyncio.timeout(pace.seconds):
                    await self._is_wanted.wait()
                pace.hurry()
            except TimeoutError:
                pace.slow_down()

    async def _read(self) -> bool:
        """Give each watcher what is new, and return whether anything is."""
        ready = [watcher for watcher in self.watchers if watcher.has_room]
        positions: dict[uuid.UUID, int] = {}
        for watcher in ready:
            positions[watcher.task_id] = min(watcher.position, positions.get(watcher.task_id, watcher.position))
        if not positions:
            return False
        try:
            found = await call_ledger(partial(_read_since, positions))
        except Exception as error:
            if not self._is_failing:  # one line for each outage
                logger.warning(
                    "Tasks cannot be followed at the moment: %s", error, extra={"event": "tasks_not_followed"}
                )
            self._is_failing = True
            return False
        self._is_failing = False
        by_task: dict[uuid.UUID, list[Transition]] = {}
        for task_id, transition in found:
            by_task.setdefault(task_id, []).append(transition)
        for watcher in ready:
            for transition in by_task.get(watcher.task_id, ()):
                watcher.give(transition)
        return bool(found)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, TaskFeed] = WeakKeyDictionary()


def task_feed() -> TaskFeed:
    """Return the feed of this event loop."""
    return _by_loop.setdefault(asyncio.get_running_loop(), TaskFeed())


def _read_since(positions: dict[uuid.UUID, int]) -> list[tuple[uuid.UUID, Transition]]:
    with engine().connect() as connection:
        return read_new_transitions(connection, positions)
