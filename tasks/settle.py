"""Writing down what became of tasks, in the rules of the seed (000, section 2.3).

    Succeeded   RUNNING → SUCCEEDED, with the result
    Retry       attempt_count + 1; with the last attempt DEAD, else RETRYING at now + backoff(attempt_count), and the
                ring for that time is written with it
    Dead        attempt_count + 1; DEAD, with its dead letter
    Snoozed     RUNNING → RETRYING, no attempt burned
    Discarded   RUNNING → DISCARDED
    Released    RUNNING → QUEUED, with its ring

A task whose lease is lost is in none of the answers: nothing is written for it but an audit (P2). Nobody commits here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import TextClause

import metrics
from outbox.backoff import backoff_ms
from outbox.lease import Db, connection_of
from settings import Settings
from tasks import rings
from tasks.actor import actor
from tasks.outcomes import Dead, Discarded, Failure, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.registry import Handler
from tasks.settle_statements import AUDIT, DEAD, DISCARD, ISOLATE, RELEASE, RETRY, SNOOZE, SUCCEED
from tasks.task import Task

Outcomes = Sequence[tuple[Task, Outcome]]
Columns = Mapping[str, list[Any]]


class Settlement:
    """Settling under one lease."""

    def __init__(self, token: uuid.UUID, handler: Handler, settings: Settings) -> None:
        self.token = token
        self.handler = handler
        self.settings = settings

    def settle(self, db: Db, outcomes: Outcomes, *, is_last: bool = False, batch: str | None = None) -> set[uuid.UUID]:
        """Returns the ids that were settled. `is_last` ends the lease; `batch` is what the transaction began with."""
        groups: dict[str, list[tuple[Task, Any]]] = {}
        for task, outcome in outcomes:
            final = self._last_attempt(task, outcome)
            groups.setdefault(type(final).__name__, []).append((task, final))
        settled: set[uuid.UUID] = set()
        for place, (kind, group) in enumerate(groups.items(), start=1):
            statement, columns = _STATEMENTS[kind](self, group)
            values = {**columns, "batch": batch, "is_last": is_last and place == len(groups)}
            settled |= self._execute(db, statement, [task for task, _ in group], values)
        return settled

    def isolate(self, db: Db, tasks: Sequence[Task], why: str) -> set[uuid.UUID]:
        """They were in a batch that was lost: alone next time, and no attempt burned (P5)."""
        return self._execute(db, ISOLATE, tasks, {"why": [why] * len(tasks), "is_last": True})

    def audit(self, db: Db, ids: Sequence[uuid.UUID], code: str, detail: str | None = None) -> None:
        """A lost lease: what this holder could not write, and what it found instead."""
        values = {"id": list(ids), "code": code, "worker_id": actor(), "detail": detail}
        connection_of(db).execute(AUDIT, values)
        metrics.LEASE_LOST_TOTAL.inc(len(ids))

    def _execute(
        self, db: Db, statement: TextClause, tasks: Sequence[Task], values: Mapping[str, Any]
    ) -> set[uuid.UUID]:
        parameters = {
            **values,
            "id": [task.id for task in tasks],
            "token": self.token,
            "actor": actor(),
            **rings.ring_values(db, {task.queue for task in tasks}),
        }
        ids, ours = connection_of(db).execute(statement, parameters).one()
        rings.publish_after_commit(db, ours)
        return set(ids or ())

    def _last_attempt(self, task: Task, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Retry) and task.attempt_count + 1 >= task.max_attempts:
            return Dead(outcome.failure)
        return outcome

    def _wait_ms(self, task: Task) -> float:
        attempt = task.attempt_count + 1
        if self.handler.backoff:
            return self.handler.backoff[min(attempt, len(self.handler.backoff)) - 1] * 1000
        return backoff_ms(
            attempt,
            base_ms=self.settings.ingest_retry_base_backoff_ms,
            cap_ms=self.settings.ingest_retry_max_backoff_ms,
            jitter=self.settings.ingest_retry_jitter,
        )

    def _succeed(self, group: Sequence[tuple[Task, Succeeded]]) -> tuple[TextClause, Columns]:
        return SUCCEED, {"result": [outcome.written for _, outcome in group]}

    def _retry(self, group: Sequence[tuple[Task, Retry]]) -> tuple[TextClause, Columns]:
        errors = _errors([outcome.failure for _, outcome in group])
        return RETRY, {**errors, "wait_ms": [self._wait_ms(task) for task, _ in group]}

    def _bury(self, group: Sequence[tuple[Task, Dead]]) -> tuple[TextClause, Mapping[str, Any]]:
        queue = self.settings.ingest_dlq_queue
        errors = _errors([outcome.failure for _, outcome in group])
        return DEAD, {**errors, "dead_letters": f"{rings.RING}{queue}" if queue else ""}

    def _snooze(self, group: Sequence[tuple[Task, Snoozed]]) -> tuple[TextClause, Columns]:
        return SNOOZE, {"wait_ms": [outcome.seconds * 1000 for _, outcome in group]}

    def _discard(self, group: Sequence[tuple[Task, Discarded]]) -> tuple[TextClause, Columns]:
        return DISCARD, {"why": [outcome.why for _, outcome in group]}

    def _release(self, group: Sequence[tuple[Task, Released]]) -> tuple[TextClause, Columns]:
        return RELEASE, {"why": [outcome.why for _, outcome in group]}


_STATEMENTS: Mapping[str, Callable[[Settlement, Sequence[tuple[Task, Any]]], tuple[TextClause, Mapping[str, Any]]]] = {
    Succeeded.__name__: Settlement._succeed,
    Retry.__name__: Settlement._retry,
    Dead.__name__: Settlement._bury,
    Snoozed.__name__: Settlement._snooze,
    Discarded.__name__: Settlement._discard,
    Released.__name__: Settlement._release,
}


def _errors(failures: Sequence[Failure]) -> Columns:
    return {
        "last_error": [failure.trace for failure in failures],
        "error_message": [failure.message for failure in failures],
        "error_code": [failure.code for failure in failures],
    }
