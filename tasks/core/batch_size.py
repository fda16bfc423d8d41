"""Choose the size of a batch from the time that tasks of a type take in this process.

The tasks of a batch share one commit, which pays while a task takes milliseconds. A hundred slow tasks in one batch
would wait for each other while other workers are idle, and the first effect would be visible only after the last task.
So a batch has as many tasks as take about half a second, and at most the batch size of its handler. Ids of a message
beyond that get a new wake-up, for the next free worker. The first task of a type in a process runs alone, to measure
it.

A batch handler always gets its full batch: half as many tasks need not take half the time. So does an async handler,
whose tasks run at the same time. The tasks of any other handler with `max_running` are claimed one at a time, because a
task that waits behind another one of its batch would occupy a place that another worker could use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tasks.core.registry import Handler

BATCH_SECONDS: Final = 0.5
STOP_SECONDS: Final = 1.0  # a batch that turns out to be slow starts no further task after this time
# The weight of the latest duration. Becoming quicker counts more: a batch that is too large stops by itself.
_WEIGHT_IF_SLOWER: Final = 0.1
_WEIGHT_IF_QUICKER: Final = 0.5
_seconds: dict[str, float] = {}  # the moving average of a task's duration, by type


def record_duration(handler: Handler, seconds: float) -> None:
    """Include the duration of one task in the average of its type."""
    before = _seconds.get(handler.type, seconds)
    weight = _WEIGHT_IF_SLOWER if seconds > before else _WEIGHT_IF_QUICKER
    _seconds[handler.type] = before + weight * (seconds - before)


def batch_of(handler: Handler) -> int:
    """Return the largest batch for this handler; its full batch if the duration of its tasks is unknown."""
    seconds = _seconds.get(handler.type, 0.0)
    if _is_always_full(handler) or seconds * handler.batch <= BATCH_SECONDS:
        return handler.batch
    return max(1, int(BATCH_SECONDS / seconds))


def batch_to_claim(handler: Handler) -> int:
    """Return how many tasks to claim: one if this process has not run the type before."""
    if is_one_at_a_time(handler):
        return 1
    return batch_of(handler) if _is_always_full(handler) or handler.type in _seconds else 1


def _is_always_full(handler: Handler) -> bool:
    return handler.many or handler.is_async


def is_one_at_a_time(handler: Handler) -> bool:
    return not _is_always_full(handler) and handler.limits is not None and handler.limits.max_running is not None


def smallest_batch(handlers: Iterable[Handler]) -> int | None:
    """Return the batch of the slowest type, or None if every type gets its full batch."""
    return min((batch for handler in handlers if (batch := batch_of(handler)) < handler.batch), default=None)


def is_kept_small(handler: Handler, tasks: int) -> bool:
    """Return True if a batch of so many tasks was kept small because the tasks are slow."""
    return batch_of(handler) <= tasks < handler.batch
