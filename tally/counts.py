"""Count in this process what no statement settles, and append it to the tally about once a second.

A process that is killed loses what it has counted in its last second. One that ends appends it first. While the ledger
is unreachable, the counts are kept; there is one number for each kind of thing that happened, however often.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Collection
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

import settings
from models.engine import autocommit, engine
from models.errors import CeleriacError
from tally.append import APPEND, Counted, Sums, append_values
from tally.subjects import Subject

logger = logging.getLogger(__name__)

APPEND_SECONDS: Final = 1.0


class Counts:
    """What this process has counted and not yet appended. A forked child starts with nothing."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.append, is_last=True)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Counted, Sums] = {}
        self._timer: threading.Timer | None = None
        self._is_delayed = False

    def add(self, counted: Counted, sums: Sums) -> None:
        with self._lock:
            self._sums[counted] = self._sums.get(counted, Sums()) + sums
            if self._timer is None:
                self._timer = threading.Timer(APPEND_SECONDS, self.append)
                self._timer.daemon = True
                self._timer.start()

    def append(self, *, is_last: bool = False) -> None:
        """Append everything to the tally. If the ledger cannot be reached, keep it, unless this `is_last`."""
        with self._lock:
            sums, self._sums = self._sums, {}
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if not sums:
            return
        try:
            with autocommit(engine()) as connection:
                connection.execute(APPEND, append_values(sums))
        except (SQLAlchemyError, CeleriacError, settings.SettingsError) as error:
            if not self._is_delayed:
                reason = str(error).partition("\n")[0]
                logger.warning("Counts for the metrics are written later: %s", reason, extra={"event": "tally_delayed"})
            self._is_delayed = not is_last
            for counted, each in () if is_last else sums.items():
                self.add(counted, each)
        else:
            self._is_delayed = False


counts: Final = Counts()


def count(
    subject: Subject,
    result: str,
    how_many: int = 1,
    *,
    queue: str = "",
    type: str = "",
    runs: Collection[float] = (),
    waits: Collection[float] = (),
) -> None:
    """Count something that happened in this process."""
    if how_many or runs:
        counts.add(Counted(subject, result, queue, type), Sums.of(how_many, runs, waits))
