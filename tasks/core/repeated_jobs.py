"""Run jobs that are repeated for as long as a process lives: an error must not end the thread that runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from models.ledger_outage import is_outage, outage

logger = logging.getLogger(__name__)

Job = Callable[[], bool | None]  # False: nothing was due, so nothing was tried


class RepeatedJobs:
    """The jobs of one thread. `name` is the subject of what is logged.

    What fails is logged only when it begins to fail, because the next run may succeed. An outage of the ledger is one
    event of the process (`models/ledger_outage.py`), however many jobs meet it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._failing: set[str] = set()
        self._waiting: set[str] = set()  # for the ledger

    def run(self, what: str, job: Job) -> None:
        """Run a job. An error is not raised."""
        try:
            if job() is False:
                return
        except Exception as error:
            if is_outage(error):
                self._waiting.add(what)
                outage.note_failure(error)
                return
            if what not in self._failing:
                reason = str(error).partition("\n")[0]
                logger.warning("%s cannot %s: %s", self.name, what, reason, extra={"event": "repeated_job_failed"})
            self._failing.add(what)
        else:
            self._failing.discard(what)
            if what in self._waiting:
                self._waiting.discard(what)
                outage.note_answer()
