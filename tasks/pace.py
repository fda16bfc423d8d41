"""How long tasks of a type take in this process, and so how many of them make a batch.

A batch shares one commit, which pays as long as its tasks take milliseconds. A hundred slow ones would wait for each
other in one worker while the next one is idle, and nobody would see the first effect before the last. So a batch is
what takes about half a second, at most what its handler says; what a message names beyond that is rung anew, for
whoever is free. The first task of a type in a process runs alone, and then its pace is known.

A handler of many decides for itself: half as many need not take half the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tasks.registry import Handler

BATCH_SECONDS: Final = 0.5
STOP_SECONDS: Final = 1.0  # a batch that turns out to be slow starts nothing after that
_WEIGHT: Final = 0.1  # of the last task
_seconds: dict[str, float] = {}


def note(handler: Handler, seconds: float) -> None:
    """So long took one task, in its handler."""
    before = _seconds.get(handler.type, seconds)
    _seconds[handler.type] = before + _WEIGHT * (seconds - before)


def batch_of(handler: Handler, *, unknown: int | None = None) -> int:
    """At most so many; of a type that this process has never run so many as `unknown` says, or any."""
    seconds = 0.0 if handler.many else _seconds.get(handler.type)
    if seconds is None:
        return unknown or handler.batch
    if seconds * handler.batch <= BATCH_SECONDS:
        return handler.batch
    return max(1, int(BATCH_SECONDS / seconds))


def smallest_batch(handlers: Iterable[Handler]) -> int | None:
    """Of the slowest of these types. None: none is slow."""
    return min((batch for handler in handlers if (batch := batch_of(handler)) < handler.batch), default=None)


def fills_a_small_batch(handler: Handler, tasks: int) -> bool:
    """So many and no more because they are slow."""
    return batch_of(handler) <= tasks < handler.batch
