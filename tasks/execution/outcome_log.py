"""Log what became of tasks, after it was committed.

A failed attempt is one record, with the exception as `exc_info`: ERROR for the last attempt, WARNING for earlier ones.
So Sentry and similar tools, which read records, get the exception with its traceback. Our own log lines do not show it
(`tasks/core/logs.py`), because its text may contain parts of the payload; `manage.py show ID` has it. All other
outcomes are one record per batch, with the ids of the tasks, or several if the batch has more than MOST_IDS.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from tasks.core.logs import OUTCOMES
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.task import Task
from tasks.execution.decision import dead_after_last_attempt
from tracing import TracedTask, batch_fields, task_fields

logger = logging.getLogger(OUTCOMES)
Traced = TypeVar("Traced", bound=TracedTask)

MOST_IDS: Final = 100  # in one record
EVENTS: Final[dict[type[Any], str]] = {
    Succeeded: "tasks_succeeded",
    Snoozed: "tasks_snoozed",
    Discarded: "tasks_discarded",
    Released: "tasks_released",
    Isolated: "tasks_isolated",
}


def log_outcomes(settled: Mapping[Task, Outcome]) -> None:
    """Log outcomes that were written to the ledger."""
    logs_batches = logger.isEnabledFor(logging.INFO)
    batches: dict[str, list[Task]] = defaultdict(list)
    for task, outcome in settled.items():
        if isinstance(outcome, Retry | Dead):
            _log_failure(task, dead_after_last_attempt(task, outcome))
        elif logs_batches:
            batches[EVENTS[type(outcome)]].append(task)
    for event, tasks in batches.items():
        for some in parts(tasks):
            logger.info("%s: %d of %s", event, len(some), some[0].type, extra={"event": event, **batch_fields(some)})


def parts(tasks: Sequence[Traced]) -> Iterator[Sequence[Traced]]:
    """Yield tasks in parts that fit into one record."""
    for start in range(0, len(tasks), MOST_IDS):
        yield tasks[start : start + MOST_IDS]


def _log_failure(task: Task, outcome: Outcome) -> None:
    assert isinstance(outcome, Retry | Dead)
    is_dead = isinstance(outcome, Dead)
    failure, attempt = outcome.failure, task.attempt_count + 1
    fields = task_fields("task_dead" if is_dead else "task_failed", task) | {
        "queue": task.queue,
        "code": str(failure.code),
        "attempt": attempt,
        "maxAttempts": task.max_attempts,
    }
    sentence = "The task failed for good" if is_dead else "The task failed and will be retried"
    logger.log(
        logging.ERROR if is_dead else logging.WARNING,
        f"{sentence}: %s, attempt %d of %d.",
        failure.code,
        attempt,
        task.max_attempts,
        exc_info=failure.raised.error,
        extra=fields,
    )
