"""Checks the sinks: whether they are ready, and whether they remember effects for long enough."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from checks.result import Finding, fail, ok, warn
from settings import Settings

REMEDY: Final = "see `manage.py sinks`; `manage.py sinks prepare NAME` creates what is missing"
OLDEST: Final = timedelta(seconds=60)


def check(settings: Settings) -> Iterator[Finding]:
    from tasks.operations.sink_list import list_sinks  # noqa: PLC0415 - as in checks/kafka.py

    longest = longest_retry_path(settings)
    for sink in list_sinks() if settings.sinks else ():
        name = f"sink.{sink.name}"
        yield ok(name, sink.health) if sink.is_ready else fail(name, sink.health, REMEDY)
        if sink.oldest is not None and sink.oldest > OLDEST:
            message = f"{sink.in_doubt} transactions in doubt, the oldest for {sink.oldest.total_seconds():.0f} s"
            yield warn(name, message, "run `manage.py recover` and read its answer")
        if sink.key_life is not None and sink.key_life <= longest:
            hours = longest.total_seconds() / 3600
            yield warn(
                name,
                f"it forgets effects after {sink.key_life}, but a task may be retried for {longest}",
                f"set key_life_hours of the sink to more than {hours:.0f}",
            )


def longest_retry_path(settings: Settings) -> timedelta:
    """Return how long after its first attempt a task may run, without an operator: all attempts with all delays."""
    delay = settings.ingest_retry_max_backoff_ms / 1000 * (1 + settings.ingest_retry_jitter)
    return timedelta(seconds=settings.ingest_max_attempts * delay)
