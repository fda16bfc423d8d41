"""Count what became of delivered tasks, in `ingest_task_process_total` and `ingest_task_process_seconds`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import metrics
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.task import Task

_RESULTS: Final[dict[type[Outcome], str]] = {
    Succeeded: "succeeded",
    Retry: "retry",
    Dead: "dead",
    Snoozed: "snoozed",
    Discarded: "discarded",
    Released: "released",
    Isolated: "released",
}


def count(result: str, how_many: int) -> None:
    """Count tasks that were delivered with this result."""
    if how_many:
        metrics.INGEST_TASK_PROCESS_TOTAL.labels(result).inc(how_many)


def count_outcomes(outcomes: Mapping[Task, Outcome], seconds: Mapping[Task, float]) -> None:
    """Count settled tasks. `seconds` has the time in the handler of those tasks whose handler was called."""
    durations: dict[type[Outcome], list[float | None]] = defaultdict(list)
    for task, outcome in outcomes.items():
        durations[type(outcome)].append(seconds.get(task))
    for kind, spent in durations.items():
        count(_RESULTS[kind], len(spent))
        known = [each for each in spent if each is not None]
        metrics.observe_many(metrics.INGEST_TASK_PROCESS_SECONDS.labels(_RESULTS[kind]), known)
