"""Writing down what became of tasks: one transition for each outcome.

    Succeeded   RUNNING → SUCCEEDED, with the result
    Retry       attempt_count + 1; with the last attempt DEAD, else RETRYING at now + backoff(attempt_count), and the
                wake-up for that time is written with it
    Dead        attempt_count + 1; DEAD, with its dead letter
    Snoozed     RUNNING → RETRYING, no attempt burned
    Discarded   RUNNING → DISCARDED
    Released    RUNNING → QUEUED, with its wake-up
    Isolated    RUNNING → RETRYING, due at once, with a wake-up of its own

A final state of a task with a partition key wakes the task that is now the first of that key.

A task whose lease is lost is in none of the answers: nothing is written for it but an audit (P2). Nobody commits here.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import metrics
from models.driver_values import array, array_of_ids
from models.prepared_statements import Prepared
from outbox.backoff import backoff_ms
from outbox.destinations import CELERY
from outbox.lease import Db, connection_of
from settings import Settings
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.outcomes import Dead, Outcome, Retry, Snoozed, Succeeded
from tasks.core.partition_keys import skipping
from tasks.core.registry import Handler, handlers
from tasks.core.task import Task
from tasks.execution.settle_statements import AUDIT, TRANSITIONS, settling

Outcomes = Sequence[tuple[Task, Outcome]]
Columns = Mapping[str, Any]


class Settlement:
    """Settling under one lease."""

    def __init__(self, token: uuid.UUID, handler: Handler, settings: Settings) -> None:
        self.token = token
        self.handler = handler
        self.settings = settings

    def settle(
        self, db: Db, outcomes: Outcomes, *, is_last: bool = False, in_batch: bool = False
    ) -> dict[Task, Outcome]:
        """Returns what was settled, and as what. `is_last` ends the lease; `in_batch`: with the handlers' effects."""
        groups: dict[type[Outcome], list[tuple[Task, Any]]] = defaultdict(list)
        for pair in outcomes:
            final = _final(*pair) if type(pair[1]) is Retry else pair
            groups[type(final[1])].append(final)
        settled: dict[Task, Outcome] = {}
        for group in groups.values():
            statement, columns = self._statement(group, in_batch=in_batch)
            values = {**columns, "is_last": is_last and not settled}  # the lease before all tasks
            ids = self._execute(db, statement, [task for task, _ in group], values)
            settled.update(group if ids is None else (pair for pair in group if pair[0].id in ids))
        return settled

    def audit(self, db: Db, ids: Sequence[uuid.UUID], code: str, *, is_last: bool) -> None:
        """A lost lease: what this holder could not write, and what it found instead."""
        values = {"id": array_of_ids(ids), "code": code, "worker_id": actor(), "token": self.token, "is_last": is_last}
        connection_of(db).execute(AUDIT, values)
        metrics.LEASE_LOST_TOTAL.inc(len(ids))

    def _execute(
        self, db: Db, statement: Prepared, tasks: Sequence[Task], values: Mapping[str, Any]
    ) -> set[uuid.UUID] | None:
        """The ids that were settled; None if it was all of them."""
        parameters = {
            **values,
            "id": array_of_ids(task.id for task in tasks),
            "token": self.token,
            "actor": actor(),
            **wakeups.wakeup_values(db, {task.queue for task in tasks}),
        }
        ids, ours = statement.execute(connection_of(db), parameters).one()
        wakeups.publish_after_commit(db, ours)
        return None if ids is None else set(ids)

    def _statement(self, group: Sequence[tuple[Task, Any]], *, in_batch: bool) -> tuple[Prepared, Columns]:
        """One statement for outcomes of one kind, and its value for each task."""
        kind: Any = type(group[0][1])
        transition = TRANSITIONS[kind]
        values = {name: array(_COLUMNS[name](self, *pair) for pair in group) for name in transition.columns}
        frees_keys = (
            transition.is_final
            and (kind is not Dead or self.handler.skip_dead)
            and any(task.partition_key is not None for task, _ in group)
        )
        if frees_keys:
            values["skipping"] = skipping(handlers())
        if kind is Dead:
            queue = self.settings.ingest_dlq_queue
            values["dead_letters"] = f"{CELERY}{queue}" if queue else ""
        return settling(kind, frees_keys=frees_keys, in_batch=in_batch and kind is Succeeded), values

    def _wait_ms(self, task: Task, failed: Retry | Snoozed) -> float:
        if isinstance(failed, Snoozed):
            return failed.seconds * 1000
        return max(self._backoff_ms(task.attempt_count + 1), failed.least_seconds * 1000)

    def _backoff_ms(self, attempt: int) -> float:
        if self.handler.backoff:
            return self.handler.backoff[min(attempt, len(self.handler.backoff)) - 1] * 1000
        return backoff_ms(
            attempt,
            base_ms=self.settings.ingest_retry_base_backoff_ms,
            cap_ms=self.settings.ingest_retry_max_backoff_ms,
            jitter=self.settings.ingest_retry_jitter,
        )


def _final(task: Task, failed: Any) -> tuple[Task, Outcome]:
    """The last attempt that fails is the end."""
    return task, Dead(failed.failure) if task.attempt_count + 1 >= task.max_attempts else failed


_COLUMNS: Final[dict[str, Callable[[Settlement, Task, Any], Any]]] = {
    "result": lambda _, __, succeeded: succeeded.written,
    "why": lambda _, __, outcome: outcome.why,
    "wait_ms": lambda settlement, task, outcome: settlement._wait_ms(task, outcome),
    "last_error": lambda _, __, failed: failed.failure.trace,
    "error_message": lambda _, __, failed: failed.failure.message,
    "error_code": lambda _, __, failed: failed.failure.code,
}
