"""The heartbeat: one thread per process, with a connection of its own, renews every lease of the process.

It starts with the first lease, after the fork, and never runs on Celery's event loop. A lease that is no longer in the
ledger was reclaimed: it is marked as lost, and steps of its tasks raise `LeaseLost`. While the ledger is unreachable,
the thread waits for it, and renews all leases as soon as it answers.

The thread also enforces hard time limits: it writes the reason into the lease, so that reclaim can say why the process
ended, and kills the process. A worker whose handlers run in threads ends more gently: the lease is left to reclaim, and
the other handlers get some time (`tasks/pools.py`).

Every second it checks the task whose handler is running, unless it is a batch handler: if the task was discarded or
another worker took it over, it raises `LeaseLost` in the handler, which can clean up in a `finally`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

import metrics
import settings
from models.engine import make_engine
from models.errors import CeleriacError, LeaseLost, Unreachable
from models.ledger_outage import is_outage, wait_for_ledger
from models.process_singleton import OnePerProcess
from models.sql import sql
from tasks.core.lease import HeldLease
from tracing import TracedTask, batch_fields, task_fields

logger = logging.getLogger(__name__)

STATEMENT_TIMEOUT_SECONDS: Final = 5.0
BEATS_PER_LEASE: Final = 3
LOOK_SECONDS: Final = 0.5  # how often hard limits are checked

# renew: held → held for one more lease from now. A lease that is locked at this moment is returned, but not renewed:
# reclaim or the last settling may be working on it. Nor is one that was given up with a reason.
RENEW: Final = sql("""
    WITH held AS MATERIALIZED (
        SELECT token FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[])) AND reason IS NULL ORDER BY token
        FOR NO KEY UPDATE SKIP LOCKED),
    renewed AS (
        UPDATE ledger.task_lease
        SET lease_until = (SELECT ledger.ledger_now()) + make_interval(secs => :lease_seconds), is_extended = false
        FROM held WHERE task_lease.token = held.token
        RETURNING task_lease.token)
    SELECT token, token IN (SELECT token FROM renewed) FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[]))
""")

# give_reason: a lease whose process is about to end → expired, with the reason for reclaim.
GIVE_REASON: Final = sql("""
    UPDATE ledger.task_lease SET reason = :reason, lease_until = (SELECT ledger.ledger_now()) WHERE token = :token
""")

WATCH_SECONDS: Final = 1.0
# still_held: of the watched tasks, those that their holder still has.
STILL_HELD: Final = sql("""
    SELECT id, lease_token FROM ledger.ingest_task
    WHERE id = ANY(CAST(:ids AS uuid[])) AND lease_token = ANY(CAST(:tokens AS uuid[]))
""")


class Heartbeat:
    """The renewing thread of this process."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self.lease_seconds = current.ingest_lease_seconds
        self._held: dict[int, HeldLease] = {}  # by identity: tasks of an async handler share a token
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None

    @contextmanager
    def holding(self, lease: HeldLease) -> Iterator[HeldLease]:
        """Renew this lease while the block runs."""
        lease.renew = lambda: wait_for_ledger(self.beat)  # called by a step whose lease has expired
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                thread.start()
                self._thread = thread  # only now: if it could not be started, the next lease tries again
            self._held[id(lease)] = lease
        try:
            yield lease
        finally:
            with self._lock:
                self._held.pop(id(lease), None)  # a handler that exceeded its hard limit has lost it

    def beat(self) -> None:
        """Renew all leases once."""
        held = self.held()
        if not held:
            return
        started_at = time.monotonic()
        with self._connections().begin() as connection:
            values = {"tokens": list({lease.token for lease in held}), "lease_seconds": self.lease_seconds}
            found: dict[uuid.UUID, bool] = dict(connection.execute(RENEW, values).all())
        metrics.LEASE_RENEWALS_TOTAL.labels("renewed").inc(sum(found.values()))
        lost: dict[uuid.UUID, list[TracedTask]] = {}  # by token: the tasks whose handlers run
        for lease in held:
            if found.get(lease.token):
                lease.deadline = started_at + self.lease_seconds
            elif lease.token not in found and not lease.is_lost and id(lease) in self._held:  # not settled meanwhile
                lease.is_lost = True
                running = lost.setdefault(lease.token, [])
                if lease.running is not None and lease.hard_limit_at is not None:
                    running.append(lease.running)
        for token, tasks in lost.items():
            metrics.LEASE_RENEWALS_TOTAL.labels("lost").inc()
            about = {"event": "lease_lost", **(batch_fields(tasks) if tasks else {})}
            logger.warning("the lease %s is lost", token, extra=about)

    def watch(self) -> None:
        """Interrupt handlers whose task was discarded or taken over by another worker."""
        watched = [(lease, one) for lease in self.held() if (one := lease.watched) is not None]
        if not watched:
            return
        values = {
            "ids": list({one.task_id for _, one in watched}),
            "tokens": list({lease.token for lease, _ in watched}),
        }
        with self._connections().begin() as connection:
            kept = {tuple(row) for row in connection.execute(STILL_HELD, values)}
        for lease, one in watched:
            if (one.task_id, lease.token) not in kept and lease.watched is one:  # and not settled meanwhile
                one.is_lost = True
                one.interrupt(LeaseLost())

    def close(self) -> None:
        """End the thread and its connection."""
        self._closed.set()
        if self._thread is None and self._engine is not None:
            self._engine.dispose()

    def _connections(self) -> Engine:
        if self._engine is None:
            self._engine = make_engine(
                self.settings.database_url,
                application_name="celeriac-heartbeat",
                statement_timeout_seconds=STATEMENT_TIMEOUT_SECONDS,
                pool_size=1,
            )
        return self._engine

    def _run(self) -> None:
        pause = self.lease_seconds / BEATS_PER_LEASE
        next_beat = time.monotonic() + pause
        next_watch = time.monotonic() + WATCH_SECONDS
        while not self._closed.is_set():
            self._pause(max(0.05, min(next_beat, next_watch) - time.monotonic()))
            try:
                if time.monotonic() >= next_watch:
                    next_watch = time.monotonic() + WATCH_SECONDS
                    self.watch()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + pause
                    if not self._held:  # then `beat` asks the ledger nothing, and must not count as its answer
                        continue
                    wait_for_ledger(self.beat, pause=self._pause_unless_closed)
            except (DBAPIError, CeleriacError) as error:
                if not is_outage(error):  # `watch` does not wait for the ledger: it runs again in a second
                    logger.warning(
                        "Leases could not be renewed: %s",
                        str(error).partition("\n")[0],
                        extra={"event": "leases_not_renewed"},
                    )
        if self._engine is not None:
            self._engine.dispose()

    def _pause(self, seconds: float) -> None:
        """Wait, and enforce hard limits meanwhile."""
        until = time.monotonic() + seconds
        while (left := min(until, self._next_limit()) - time.monotonic()) > 0 and not self._closed.is_set():
            self._closed.wait(min(left, LOOK_SECONDS))
        self._enforce_hard_limit()

    def _pause_unless_closed(self, seconds: float) -> None:
        self._pause(seconds)
        if self._closed.is_set():
            raise Unreachable

    def _next_limit(self) -> float:
        with self._lock:
            return min((held.hard_limit_at for held in self._held.values() if held.hard_limit_at), default=float("inf"))

    def _enforce_hard_limit(self) -> None:
        now = time.monotonic()
        for lease in self.held():
            if lease.hard_limit_at and now >= lease.hard_limit_at:
                reason = process_was_killed(lease.hard_limit_seconds)
                about = {"event": "process_ended_at_hard_limit"}
                if lease.running is not None:
                    about |= task_fields("process_ended_at_hard_limit", lease.running)
                logger.error(reason, extra=about)
                with self._lock:
                    self._held.pop(id(lease), None)
                lease.is_lost = True
                with suppress(DBAPIError, CeleriacError), self._connections().begin() as connection:
                    connection.execute(GIVE_REASON, {"token": lease.token, "reason": reason})
                end_process()

    def held(self) -> list[HeldLease]:
        """Return the leases that this process holds at the moment."""
        with self._lock:
            return list(self._held.values())


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_process() -> None:
    """End this process, whose handler has exceeded its hard limit."""
    _end[-1]()


def end_process_with(end: Callable[[], None]) -> None:
    """Call this function at a hard limit, instead of killing the process. It may return before the process ends."""
    _end.append(end)


_end: Final[list[Callable[[], None]]] = [kill_process]


def process_was_killed(hard_limit_seconds: float) -> str:
    """Return the reason that reclaim reports for the task."""
    return f"The handler exceeded its hard limit of {hard_limit_seconds:g} s; its process was killed."


heartbeat: Final = OnePerProcess(Heartbeat)
