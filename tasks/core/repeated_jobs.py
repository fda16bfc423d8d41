"""Run jobs that are repeated for as long as a process lives: an error must not end the thread that runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class RepeatedJobs:
    """The jobs of one thread. `name` is the subject of what is logged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._failing: set[str] = set()

    def run(self, what: str, job: Callable[[], None]) -> None:
        """Run a job. An error is logged only when it begins, because the next run may succeed."""
        try:
            job()
            self._failing.discard(what)
        except Exception as error:
            if what not in self._failing:
                reason = str(error).partition("\n")[0]
                logger.warning("%s cannot %s: %s", self.name, what, reason, extra={"event": "repeated_job_failed"})
            self._failing.add(what)
