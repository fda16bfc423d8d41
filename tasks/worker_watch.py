"""Watch over a worker from a thread of its main process.

It renews the worker's registration in the ledger, and gives the pool the size that the ledger asks for. Three more
things would otherwise be noticed late or never. A killed child process leaves a lease that expires only after a minute;
the main process knows at once that the child is gone, and reclaims its leases. A handler that never lets another thread
of its child run, and so cannot be stopped from there, is killed after its hard limit. And if beat has not been seen for
a few of its intervals, a worker that consumes `system` runs the ticks itself, so beat is not a single point of failure
(docs/protocol.md, Ticks).
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final

import psutil

import metrics
import settings
from models.engine import engine
from models.sql import sql
from tasks import ticks
from tasks.core.holders import holder_of
from tasks.core.registered_types import Registration
from tasks.core.repeated_jobs import Job, RepeatedJobs
from tasks.core.tick_intervals import BEAT_SEEN_SECONDS
from tasks.execution.hard_limits import Overdue
from tasks.execution.heartbeat import process_was_killed
from tasks.recovery.reclaim import reclaim_leases
from tasks.recovery.tick_rows import BEAT, tick_age

logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 0.5
RECLAIMS_PER_CHILD: Final = 10
EXIT_PATIENCE_SECONDS: Final = 2.0
SILENT_BEATS: Final = 4  # `manage.py check` uses the same number

# give_reason: leases of a process that was killed → the same, with the reason for reclaim.
GIVE_REASON: Final = sql("UPDATE ledger.task_lease SET reason = :reason WHERE holder = :holder")


class ChildPids:
    """A pipe through which child processes report their pids. Create it before the first fork.

    The watch reads the pool twice a second; some children live shorter than that.
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
    """The watch of one worker.

    `children` returns the pids of its pool, `started` those started since the last call, and `overdue` those whose
    handler has not ended at its hard limit. `resize` changes the size of its pool if the ledger asks for that.
    """

    def __init__(
        self,
        children: Callable[[], set[int]],
        *,
        started: Callable[[], set[int]] = set,
        overdue: Callable[[Collection[int]], list[Overdue]] = lambda _: [],
        runs_ticks: bool,
        registration: Registration | None = None,
        resize: Job | None = None,
    ) -> None:
        self.children = children
        self.started = started
        self.overdue = overdue
        self.runs_ticks = runs_ticks
        self.registration = registration
        self.resize = resize
        self._reasons: dict[int, str] = {}  # why children were killed, until it is written into their leases
        self._known: set[int] = set()
        self._lost: dict[int, int] = {}  # pid → how many more times its leases are reclaimed
        self._started_at = time.monotonic()
        self._ticks = ticks.DueTicks()
        self._check_beat_at = 0.0
        self._try = RepeatedJobs("The worker watch").run
        self._stopped = threading.Event()

    def start(self) -> None:
        self._known = self.children()
        self._register()
        threading.Thread(target=self._run, name="worker-watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch and the registration, without waiting: a signal handler calls this."""
        self._stopped.set()
        if self.registration:
            end = partial(self._try, "delete its registration", self.registration.end)
            ending = threading.Thread(target=end, name="worker-watch-end", daemon=True)
            ending.start()
            atexit.register(ending.join, EXIT_PATIENCE_SECONDS)

    def check(self) -> None:
        """Do all jobs once; an error in one does not prevent the others."""
        self._try("kill children that exceed their hard limit", self._kill_overdue_children)
        self._register()
        self._try("reclaim the leases of lost children", self._reclaim_from_lost_children)
        if self.resize:
            self._try("set the number of its processes", self.resize)
        if self.runs_ticks:
            self._try("run ticks in place of beat", self._tick_for_beat)

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            self.check()

    def _register(self) -> None:
        if self.registration:
            self._try("register its handlers", self.registration.tick)

    def _kill_overdue_children(self) -> None:
        """Kill first: a child that hangs may have locked its lease, and the reason must not wait for that."""
        for pid, seconds in self.overdue(self.children()):
            if pid not in self._reasons and not _has_ended(pid):
                self._reasons[pid] = process_was_killed(seconds)
                logger.error(self._reasons[pid], extra={"event": "process_killed_at_hard_limit"})
                os.kill(pid, signal.SIGKILL)

    def _give_reasons(self) -> None:
        """Say in the leases of killed children why their process ended. Reclaim has not seen these leases yet."""
        for pid, reason in list(self._reasons.items()):
            with engine().begin() as connection:
                connection.execute(GIVE_REASON, {"reason": reason, "holder": holder_of(pid)})
            del self._reasons[pid]

    def _reclaim_from_lost_children(self) -> None:
        """Reclaim several times for each lost child: a lease that is locked at this moment is skipped."""
        self._known |= self.children() | self.started()
        lost = {pid for pid in self._known if _has_ended(pid)}
        self._known -= lost
        for pid in lost:
            metrics.forget_process(pid)  # it may have ended while it waited for the ledger
        self._lost |= dict.fromkeys(lost, RECLAIMS_PER_CHILD)
        self._lost = {pid: times for pid, times in self._lost.items() if pid not in self._known}  # a pid may be reused
        self._give_reasons()
        current = settings.current()
        if self._lost and current.ingest_reclaim_enabled:
            found = reclaim_leases(engine(), current, holders=[holder_of(pid) for pid in self._lost])
            if found.leases:
                message = "A worker process died. Tasks that failed with it: %d; tasks that will run alone: %d."
                logger.warning(
                    message,
                    found.charged,
                    found.isolated,
                    extra={"event": "worker_process_lost", "failed": found.charged, "isolated": found.isolated},
                )
        self._lost = {pid: times - 1 for pid, times in self._lost.items() if times > 1}

    def _tick_for_beat(self) -> bool:
        """Check beat every few seconds. While it is silent, run the ticks that are due. Return False if none is."""
        now = time.monotonic()
        if now < self._check_beat_at:
            return False
        if not self._is_beat_silent(now):
            self._check_beat_at = now + BEAT_SEEN_SECONDS
            return True
        return self._ticks.run_due()

    def _is_beat_silent(self, now: float) -> bool:
        with engine().begin() as connection:
            age = tick_age(connection, BEAT)
        silent_seconds = now - self._started_at if age is None else age.total_seconds()
        return silent_seconds > SILENT_BEATS * BEAT_SEEN_SECONDS


def _has_ended(pid: int) -> bool:
    """Return True also for a zombie: the pool collects exit codes only every five seconds."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
