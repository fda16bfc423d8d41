"""Writing down what became of tasks, in the rules of the seed (000, section 2.3).

    Succeeded   RUNNING → SUCCEEDED, with the result
    Retry       attempt_count + 1; with the last attempt DEAD, else RETRYING at now + backoff(attempt_count), and the
                wake-up for that time is written with it
    Dead        attempt_count + 1; DEAD, with its dead letter
    Snoozed     RUNNING → RETRYING, no attempt burned
    Discarded   RUNNING → DISCARDED
    Released    RUNNING → QUEUED, with its wake-up
    Isolated    RUNNING → RETRYING, due at once, with a wake-up of its own

A final state of a task with a partition key wake-ups for whoever is first of that key now.

A task whose lease is lost is in none of the answers: nothing is written for it but an audit (P2). Nobody commits here.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import metrics
from models.driver_values import array, array_of_ids
from models.prepared import Prepared
from outbox.backoff import backoff_ms
from outbox.lease import Db, connection_of
from settings import Settings
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.partition_keys import skipping
from tasks.core.registry import Handler, handlers
from tasks.core.task import Task
from tasks.execution.settle_statements import (
    AUDIT,
    DEAD,
    DEAD_SKIPPED,
    DISCARD,
    DISCARD_KEYED,
    ISOLATE,
    RELEASE,
    RETRY,
    SNOOZE,
    SUCCEED,
    SUCCEED_IN_BATCH,
    SUCCEED_KEYED,
    SUCCEED_KEYED_IN_BATCH,
)

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

    def isolate(self, db: Db, tasks: Sequence[Task], why: str) -> dict[Task, Outcome]:
        """They were in a batch that was lost: alone next time, and no attempt burned (P5)."""
        return self.settle(db, [(task, Isolated(why)) for task in tasks], is_last=True)

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

    def _statement(self, group: Sequence[tuple[Task, Any]], *, in_batch: bool) -> tuple[Prepared, Columns]:  # noqa: PLR0911 - one each
        """One statement for outcomes of one kind, and what it needs to know of each."""
        outcomes = [outcome for _, outcome in group]
        is_keyed = any(task.partition_key is not None for task, _ in group)
        keyed = {"skipping": skipping(handlers())} if is_keyed else {}
        match outcomes[0]:
            case Succeeded():
                statement = _SUCCEEDING[is_keyed, in_batch]
                return statement, {"result": array(outcome.written for outcome in outcomes), **keyed}
            case Retry():
                return RETRY, {
                    **_errors(outcomes),
                    "wait_ms": array(self._wait_ms(task, outcome) for task, outcome in group),
                }
            case Dead():
                queue = self.settings.ingest_dlq_queue
                columns = {**_errors(outcomes), "dead_letters": f"{wakeups.WAKEUP}{queue}" if queue else ""}
                return (DEAD_SKIPPED, columns | keyed) if is_keyed and self.handler.skip_dead else (DEAD, columns)
            case Snoozed():
                return SNOOZE, {**_reasons(outcomes), "wait_ms": array(outcome.seconds * 1000 for outcome in outcomes)}
            case Discarded():
                return (DISCARD_KEYED, {**_reasons(outcomes), **keyed}) if is_keyed else (DISCARD, _reasons(outcomes))
            case Released():
                return RELEASE, _reasons(outcomes)
            case _:
                return ISOLATE, _reasons(outcomes)

    def _wait_ms(self, task: Task, failed: Retry) -> float:
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


_SUCCEEDING: Final = {  # with partition keys, in a batch
    (False, False): SUCCEED,
    (False, True): SUCCEED_IN_BATCH,
    (True, False): SUCCEED_KEYED,
    (True, True): SUCCEED_KEYED_IN_BATCH,
}


def _final(task: Task, failed: Any) -> tuple[Task, Outcome]:
    """The last attempt that fails is the end."""
    return task, Dead(failed.failure) if task.attempt_count + 1 >= task.max_attempts else failed


def _errors(outcomes: Sequence[Retry | Dead]) -> Columns:
    return {
        "last_error": array(outcome.failure.trace for outcome in outcomes),
        "error_message": array(outcome.failure.message for outcome in outcomes),
        "error_code": array(outcome.failure.code for outcome in outcomes),
    }


def _reasons(outcomes: Sequence[Discarded | Isolated | Released | Snoozed]) -> Columns:
    return {"why": array(outcome.why for outcome in outcomes)}
