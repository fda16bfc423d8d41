"""Bulk actions in the API process: threads that look for actions that wait, and work them off.

Any API process may do an action that another one has accepted. The one that accepts it is woken by the route and begins
at once; if it dies before, another one finds the action within LOOK_SECONDS. A process does MOST_AT_ONCE actions at a
time, on connections of their own, so that they hold up no request; a further action waits. When the process
stops, its actions are stopped after their batch, and an operator may continue them.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Final

from sqlalchemy import Engine, make_url

import settings
from models.engine import make_engine
from tasks.core.repeated_jobs import RepeatedJobs
from tasks.operations.bulk_run import BulkClaim, claim_next, work_off

LOOK_SECONDS: Final = 3.0
MOST_AT_ONCE: Final = 4
STOP_SECONDS: Final = 4.0  # how long a process waits for batches that are being written
_changed: Final = threading.Event()  # an action may wait, or a thread has become free


def look_for_bulk_actions() -> None:
    """Make this process look now. Call it when an action has been created or continued."""
    _changed.set()


class BulkThreads:
    """The threads of one API process."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._looking = threading.Thread(target=self._look, name="bulk-actions", daemon=True)
        self._working: list[threading.Thread] = []
        self._engine: Engine | None = None

    def start(self) -> None:
        self._looking.start()

    async def stop(self) -> None:
        """Stop the actions after their batch. A thread that waits for a silent ledger is left behind after a while."""
        self._stopped.set()
        _changed.set()
        await asyncio.to_thread(self._looking.join, STOP_SECONDS)

    def _look(self) -> None:
        jobs = RepeatedJobs("The API")
        while True:
            _changed.wait(LOOK_SECONDS)
            _changed.clear()
            if self._stopped.is_set():
                break
            jobs.run("look for bulk actions", self._begin_waiting)
        for thread in self._working:
            thread.join()
        if self._engine is not None:
            self._engine.dispose()

    def _begin_waiting(self) -> None:
        """Begin the actions that wait, as far as there are threads."""
        engine = self._connections()
        self._working = [thread for thread in self._working if thread.is_alive()]
        while len(self._working) < MOST_AT_ONCE and (claim := claim_next(engine)):
            thread = threading.Thread(target=self._work, args=(engine, claim), name="bulk-action", daemon=True)
            thread.start()
            self._working.append(thread)

    def _work(self, engine: Engine, claim: BulkClaim) -> None:
        work = partial(work_off, engine, claim, stopped=self._stopped)
        RepeatedJobs("The API").run(f"finish the bulk action {claim.action.id}", work)
        _changed.set()

    def _connections(self) -> Engine:
        """Return our engine; a new one if the settings name another database now."""
        url = settings.current().database_url
        if self._engine is None or self._engine.url != make_url(url):
            self._engine = make_engine(
                url, application_name="celeriac-bulk", pool_size=1, max_overflow=2 * MOST_AT_ONCE
            )
        return self._engine
