"""How long tasks of a type take in this process, and so how many of them make a batch.

A batch shares one commit, which pays as long as its tasks take milliseconds. A hundred slow ones would wait for each
other in one worker while the next one is idle, and nobody would see the first effect before the last. So a batch is
what takes about half a second, at most what its handler says; what a message names beyond that is woken anew, for
whoever is free. The first task of a type in a process runs alone, and then its pace is known.

A handler of many decides for itself: half as many need not take half the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tasks.core.registry import Handler

BATCH_SECONDS: Final = 0.5
STOP_SECONDS: Final = 1.0  # a batch that turns out to be slow starts nothing after that
# Of the last task. A slow one is forgotten sooner than it is believed: a batch that was made too large stops by itself.
_WEIGHT_IF_SLOWER: Final = 0.1
_WEIGHT_IF_QUICKER: Final = 0.5
_seconds: dict[str, float] = {}


def note(handler: Handler, seconds: float) -> None:
    """So long took one task, in its handler."""
    before = _seconds.get(handler.type, seconds)
    weight = _WEIGHT_IF_SLOWER if seconds > before else _WEIGHT_IF_QUICKER
    _seconds[handler.type] = before + weight * (seconds - before)


def batch_of(handler: Handler) -> int:
    """At most so many, as far as anybody here knows."""
    seconds = _seconds.get(handler.type, 0.0)
    if handler.many or seconds * handler.batch <= BATCH_SECONDS:
        return handler.batch
    return max(1, int(BATCH_SECONDS / seconds))


def batch_to_claim(handler: Handler) -> int:
    return batch_of(handler) if handler.many or handler.type in _seconds else 1


def smallest_batch(handlers: Iterable[Handler]) -> int | None:
    """Of the slowest of these types. None: none is slow."""
    return min((batch for handler in handlers if (batch := batch_of(handler)) < handler.batch), default=None)


def fills_a_small_batch(handler: Handler, tasks: int) -> bool:
    """So many and no more because they are slow."""
    return batch_of(handler) <= tasks < handler.batch
