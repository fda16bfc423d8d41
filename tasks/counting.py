"""What became of deliveries, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import metrics
from tasks.outcomes import Dead, Discarded, Outcome, Released, Retry, Snoozed, Succeeded


def count(result: str, how_many: int) -> None:
    if how_many:
        metrics.INGEST_TASK_PROCESS_TOTAL.labels(result).inc(how_many)


def count_outcomes(outcomes: Sequence[Outcome], seconds: Iterable[float]) -> None:
    """`seconds` were spent in the handlers of those that succeeded."""
    for result, how_many in Counter(map(_result, outcomes)).items():
        count(result, how_many)
    metrics.observe_many(metrics.INGEST_TASK_PROCESS_SECONDS.labels("succeeded"), seconds)


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
        case Released():
            return "released"
