"""What Celery knows: the task that runs tasks, and the ticks of beat on the `system` queue. Each calls one function."""

from __future__ import annotations

from celery import Task

from models.engine import engine
from tasks import ticks
from tasks.celery import app
from tasks.execution.deliver import ingest as run_ingest


@app.task(name="tasks.ingest")
def ingest(ids: list[str]) -> None:
    """Run the tasks that a wake-up names."""
    run_ingest(engine(), ids)


@app.task(name="tasks.dead_letter")
def dead_letter(task_id: str, error_code: str | None = None) -> None:
    """A dead letter is there to be seen; whoever consumes the queue of dead letters all the same changes nothing."""


@app.task(name="tasks.beat_seen", bind=True)
def beat_seen(self: Task[[], None]) -> None:
    """Beat, the broker and a system worker are alive, and the ledger knows it: `manage.py check` reads this."""
    ticks.record_beat(str(self.request.hostname or ""))


@app.task(name="outbox.relay")
def relay() -> None:
    """One tick of the relay, unless another one is under way."""
    ticks.run("relay")


@app.task(name="tasks.reclaim")
def reclaim() -> None:
    """Take over what was lost with its worker, and wake-up again for what was lost on the way."""
    ticks.run("reclaim")


@app.task(name="tasks.prune")
def prune() -> None:
    """What is final, or sent, and whose retention is over goes away, in small batches."""
    ticks.run("prune")
