"""What became of deliveries, counted."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping

import metrics
from tasks.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded


def count(result: str, how_many: int) -> None:
    if how_many:
        metrics.INGEST_TASK_PROCESS_TOTAL.labels(result).inc(how_many)


def count_outcomes(outcomes: Mapping[uuid.UUID, Outcome], seconds: Mapping[uuid.UUID, float]) -> None:
    """What tasks were settled as; `seconds` were spent in their handlers, where those were called."""
    results: dict[str, list[float]] = defaultdict(list)
    counts = Counter[str]()
    for task_id, outcome in outcomes.items():
        result = _result(outcome)
        counts[result] += 1
        if task_id in seconds:
            results[result].append(seconds[task_id])
    for result, how_many in counts.items():
        count(result, how_many)
        metrics.observe_many(metrics.INGEST_TASK_PROCESS_SECONDS.labels(result), results[result])


def _result(outcome: Outcome) -> str:
    match outcome:
        case Succeeded():
            return "succeeded"
        case Retry():
            return "retry"
        case Dead():
            return "dead"
        case Snoozed():
            return "snoozed"
        case Discarded():
            return "discarded"
        case Released() | Isolated():
            return "released"
