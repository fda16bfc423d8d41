"""The attendant: a thread in a worker's main process that looks after what nobody else notices at once.

A child that was killed leaves a lease that would run out a minute later: the main process knows at once that the child
is gone, and takes the lease over (P5). Beat is a convenience and no single point of failure: while no trace of it has
been seen in the ledger for a few of its intervals, a worker that consumes `system` runs the ticks itself (P24).
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil

import settings
from models.engine import engine
from tasks import ticks
from tasks.core.holders import holder_of
from tasks.core.tick_intervals import BEAT_SEEN_SECONDS, intervals
from tasks.recovery.reclaim import take_over
from tasks.recovery.tick_rows import BEAT, tick_age

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
LOOKS_AFTER_LOST: Final = 10
SILENT_BEATS: Final = 4  # as `manage.py check` counts


class ChildPids:
    """A pipe through which child processes report their pids. Create it before the first fork.

    The watch looks at the pool twice a second, and some children do not live that long.
    """

    _PID: Final = struct.Struct("i")  # short enough to be written and read as a whole

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def send_own(self) -> None:
        """Report this child's pid. Nothing happens if the pipe is full because the parent no longer reads it."""
        with suppress(BlockingIOError):
            os.write(self._writer, self._PID.pack(os.getpid()))

    def received(self) -> set[int]:
        """Return the pids that were reported since the last call."""
        found = b""
        with suppress(BlockingIOError):
            while more := os.read(self._reader, 1024 * self._PID.size):
                found += more
        return {pid for (pid,) in self._PID.iter_unpack(found)}


class WorkerWatch:
    """Of one worker. `children` says which processes its pool has now, `born` which it has got since."""

    def __init__(
        self, children: Callable[[], set[int]], *, born: Callable[[], set[int]] = set, runs_ticks: bool
    ) -> None:
        self.children = children
        self.born = born
        self.runs_ticks = runs_ticks
        self._known: set[int] = set()
        self._lost: dict[int, int] = {}  # and how often they are still looked after
        self._started_at = time.monotonic()
        self._due_at = dict.fromkeys(ticks.TICKS, 0.0)
        self._look_at_beat_at = 0.0
        self._complained: set[str] = set()
        self._stopped = threading.Event()

    def start(self) -> None:
        self._known = self.children()
        threading.Thread(target=self._run, name="attendant", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Once, at each: one that fails does not keep us from the other."""
        self._try("after children", self._take_over_from_lost_children)
        if self.runs_ticks:
            self._try("after beat", self._tick_for_beat)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            self.look()

    def _try(self, what: str, look: Callable[[], None]) -> None:
        try:
            look()
            self._complained.discard(what)
        except Exception as error:  # the next look may succeed, and there is nobody to tell
            if what not in self._complained:
                logger.warning("the attendant could not look %s: %s", what, str(error).partition("\n")[0])
            self._complained.add(what)

    def _take_over_from_lost_children(self) -> None:
        """More than once: a lease that somebody is locking at this moment is left out."""
        self._known |= self.children() | self.born()
        lost = {pid for pid in self._known if _has_ended(pid)}
        self._known -= lost
        self._lost |= dict.fromkeys(lost, LOOKS_AFTER_LOST)
        self._lost = {pid: looks for pid, looks in self._lost.items() if pid not in self._known}  # a number used again
        current = settings.current()
        if self._lost and current.ingest_reclaim_enabled:
            found = take_over(engine(), current, holders=[holder_of(pid) for pid in self._lost])
            if found.leases:
                logger.warning("a child was lost: %d tasks charged, %d isolated", found.charged, found.isolated)
        self._lost = {pid: looks - 1 for pid, looks in self._lost.items() if looks > 1}

    def _tick_for_beat(self) -> None:
        """Asks for beat now and then; while it is silent, runs what is due."""
        now = time.monotonic()
        if now >= self._look_at_beat_at and not self._is_beat_silent(now):
            self._look_at_beat_at = now + BEAT_SEEN_SECONDS
            return
        if now < self._look_at_beat_at:
            return
        for name, due_at in self._due_at.items():
            if now >= due_at:
                self._due_at[name] = now + intervals()[name]
                ticks.run(name)

    def _is_beat_silent(self, now: float) -> bool:
        longest = SILENT_BEATS * BEAT_SEEN_SECONDS
        with engine().begin() as connection:
            age = tick_age(connection, BEAT)
        if age is None:
            return now - self._started_at > longest
        return age.total_seconds() > longest


def _has_ended(pid: int) -> bool:
    """Also if nobody has fetched its exit code yet: the pool looks at that every five seconds."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
