"""Relay, reclaim and the other ticks in the API process, for installations without beat (API_RUN_TICKS=true).

The rows of the ticks in the ledger let one process run each of them at a time, so beat, workers and any number of API
processes may do the same. A tick that still runs when the process stops is left alone after STOP_SECONDS: its leases
expire, and another process goes on.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import settings
from tasks.core.repeated_jobs import RepeatedJobs
from tasks.ticks import DueTicks

STOP_SECONDS: Final = 5.0


class TickThread:
    """The thread of one API process. Nothing is started unless the settings ask for it."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)

    def start(self) -> None:
        if settings.current().api_run_ticks:
            self._thread.start()

    async def stop(self) -> None:
        """Wait for the tick that runs, but not for long."""
        self._stopped.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def _run(self) -> None:
        ticks, jobs = DueTicks(), RepeatedJobs("The API")
        while not self._stopped.wait(ticks.next_in_seconds()):
            jobs.run("run the ticks", ticks.run_due)
