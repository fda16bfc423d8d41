"""A task as it is handed in, over HTTP or with `submit --envelopes`: the envelope, and what `submit` takes besides.

A task can be submitted again as it was shown. What is shown twice has to say the same twice: of two values one would be
passed over in silence.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tasks.envelope import BadTask, NewTask, TaskEnvelope


class Submission(TaskEnvelope):
    """The body of `POST /api/tasks`, and a line of `submit --lines --envelopes`."""

    queue: str | None = None
    priority: int = 5
    run_at: datetime | None = None  # before retry.nextAttemptAt
    partition_key: str | None = None
    notify: str | None = None
    idempotency_key: str | None = None  # shown, and so are these; context and retry are what is read
    max_attempts: int | None = None
    next_retry_at: datetime | None = None

    def new_task(self) -> NewTask:
        new = super().new_task()
        _check_same("idempotencyKey", self.idempotency_key, "context.idempotencyKey", new.key)
        _check_same("maxAttempts", self.max_attempts, "retry.max", new.max_attempts)
        _check_same("nextRetryAt", self.next_retry_at, "retry.nextAttemptAt", new.run_at)
        return replace(
            new,
            queue=self.queue,
            priority=self.priority,
            run_at=self.run_at or new.run_at,
            partition_key=self.partition_key,
            notify=self.notify,
        )


def _check_same(name: str, shown: object, place: str, read: object) -> None:
    if shown is not None and shown != read:
        raise BadTask(f"{name} does not say the same as {place}, which is read: give {place} alone.")
