"""A channel for the events of tasks, as a worker has one, and what was written into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from tasks.execution.task_events import Event, EventChannel, use_channel


@contextmanager
def channel_in_use() -> Iterator[EventChannel]:
    """Let this process and its children report through a new channel, in which events are on."""
    channel = EventChannel()
    channel.switch(on=True)
    use_channel(channel)
    try:
        with closing(channel._reader), closing(channel._writer):
            yield channel
    finally:
        use_channel(None)


def written(channel: EventChannel) -> list[Event]:
    """Return the events that were written since the last call."""
    channel.end()
    found: list[Event] = []
    while some := channel.read():
        found += some
    return found


def states(events: list[Event]) -> dict[str, list[str]]:
    """Return the events of each task, in their order, without the prefix `task-`."""
    found: dict[str, list[str]] = {}
    for event in events:
        found.setdefault(event["uuid"], []).append(event["type"].removeprefix("task-"))
    return found
