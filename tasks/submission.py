"""A task as a client of the API hands it in: the envelope, and beside it what `submit` takes besides.

Whatever else is there is left alone, so that a task can be submitted again as it was shown.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from pydantic import ValidationError

from tasks.envelope import NewTask, TaskEnvelope
from tasks.json_lines import BadJson, read_json, said


class Submission(TaskEnvelope):
    """The body of `POST /api/tasks`."""

    queue: str | None = None
    priority: int = 5
    run_at: datetime | None = None  # before retry.nextAttemptAt
    partition_key: str | None = None
    notify: str | None = None

    def new_task(self) -> NewTask:
        new = super().new_task()
        return replace(
            new,
            queue=self.queue,
            priority=self.priority,
            run_at=self.run_at or new.run_at,
            partition_key=self.partition_key,
            notify=self.notify,
        )


def read_submission(raw: bytes) -> NewTask:
    """Raises BadJson, in a sentence."""
    try:
        return Submission.model_validate(read_json(raw)).new_task()
    except ValidationError as error:
        raise BadJson(f"It is no task: {said(error)}.") from None
