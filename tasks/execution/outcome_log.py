"""Log what became of tasks, after it was committed.

A failed attempt is one record, with the exception as `exc_info`: ERROR for the last attempt, WARNING for earlier ones.
So Sentry and similar tools, which read records, get the exception with its traceback. Our own log lines do not show it
(`tasks/core/logs.py`), because its text may contain parts of the payload; `manage.py show ID` has it. All other
outcomes are one record per batch, with the ids of the tasks, or several if the batch has more than MOST_IDS.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tasks.core.logs import OUTCOMES
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.task import Task
from tasks.execution.decision import dead_after_last_attempt
from tracing import task_fields

logger = logging.getLogger(OUTCOMES)

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
        for start in range(0, len(tasks), MOST_IDS):
            _log_batch(event, tasks[start : start + MOST_IDS])


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


def _log_batch(event: str, tasks: Sequence[Task]) -> None:
    fields: dict[str, Any] = {"event": event, "type": tasks[0].type, "queue": tasks[0].queue, "count": len(tasks)}
    if len(tasks) == 1:
        fields |= {"taskId": str(tasks[0].id), "traceId": tasks[0].trace_id}
    fields["taskIds"] = [str(task.id) for task in tasks]
    fields["traceIds"] = list(dict.fromkeys(task.trace_id for task in tasks))
    logger.info("%s: %d of %s", event, len(tasks), tasks[0].type, extra=fields)
