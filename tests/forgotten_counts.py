"""Forget what this process has counted for the tally."""

from __future__ import annotations

from tally.counts import counts


def forget_counts() -> None:
    """Forget the counts of the test before, and end the thread that would append them an hour later."""
    if counts._timer is not None:
        counts._timer.cancel()
    counts._reset()
