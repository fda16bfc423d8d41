"""Beat's scheduler: Celery's own, with one log line for an outage of the broker instead of a stack for each tick."""

from __future__ import annotations

import logging
from typing import Any

from celery.beat import Scheduler, SchedulingError

logger = logging.getLogger(__name__)


class TickScheduler(Scheduler):
    """Sends the ticks. One that cannot be sent is dropped: the next one does the same work."""

    _is_failing = False

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            if not self._is_failing:
                logger.error("Beat cannot send ticks: %s", error, extra={"event": "ticks_not_sent"})
            self._is_failing = True
        else:
            if self._is_failing:
                logger.warning("Beat sends ticks again.", extra={"event": "ticks_sent_again"})
            self._is_failing = False
