"""The Celery tasks: `tasks.ingest` runs our tasks, the others are the ticks that beat sends to the `system` queue.

While the ledger is unreachable, a tick does nothing, and its process says so once: beat sends the next one soon.
"""

from __future__ import annotations

from celery import Task

from models.engine import engine
from models.ledger_outage import skipped_in_outage
from tasks import broker, ticks
from tasks.celery import app
from tasks.execution.deliver import deliver


@app.task(name="tasks.ingest")
def ingest(ids: list[str]) -> None:
    """Run the tasks that a wake-up names."""
    deliver(engine(), ids, is_empty=broker.is_empty)


@app.task(name="tasks.dead_letter")
def dead_letter(task_id: str, error_code: str | None = None) -> None:
    """Do nothing: dead letters are there to be seen, and a worker that consumes their queue must not fail."""


@app.task(name="tasks.beat_seen", bind=True)
def beat_seen(self: Task[[], None]) -> None:
    """Record that beat, the broker and a system worker are alive; `manage.py check` reads this."""
    with skipped_in_outage():
        ticks.record_beat(str(self.request.hostname or ""))


@app.task(name="outbox.relay")
def relay() -> None:
    """Publish due outbox events."""
    _run("relay")


@app.task(name="tasks.reclaim")
def reclaim() -> None:
    """Reclaim the leases of lost workers, and send lost wake-ups again."""
    _run("reclaim")


@app.task(name="tasks.tally")
def tally() -> None:
    """Fold what was counted into the totals and the history."""
    _run("tally")


@app.task(name="tasks.prune")
def prune() -> None:
    """Delete final tasks and sent events after their retention."""
    _run("prune")


@app.task(name="tasks.schedules")
def schedules() -> None:
    """Submit the occurrences of schedules that are due."""
    _run("schedules")


def _run(name: str) -> None:
    with skipped_in_outage():
        ticks.run(name)
