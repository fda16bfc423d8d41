"""What workers register in the ledger: their handlers, their queues, and themselves.

`tasks/core/registered_types.py` writes these tables and `ingest_fill_in` reads them, so that every lane of submitting
has the same defaults. Types and queues stay while no worker runs: tasks can be submitted at any time.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, SmallInteger
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, Stamp


class TaskType(Base):
    """What the handler of a type declares. The worker that started last decides."""

    __tablename__ = "task_type"
    __table_args__ = (
        CheckConstraint("max_attempts >= 1", name="max_attempts"),
        CheckConstraint("batch >= 1", name="batch"),
        CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
    )

    type: Mapped[str] = mapped_column(primary_key=True)
    queue: Mapped[str]
    max_attempts: Mapped[int]  # the handler's, or INGEST_MAX_ATTEMPTS of the worker
    batch: Mapped[int]
    priority: Mapped[int] = mapped_column(SmallInteger)
    max_running: Mapped[int | None]
    rate: Mapped[str | None]
    limit_by: Mapped[str | None]
    seen_at: Mapped[Stamp]


class TaskQueue(Base):
    """A queue of INGEST_QUEUES of some worker. Other queues are refused."""

    __tablename__ = "task_queue"
    __table_args__ = (CheckConstraint("max_attempts >= 1", name="max_attempts"),)

    queue: Mapped[str] = mapped_column(primary_key=True)
    max_attempts: Mapped[int]  # INGEST_MAX_ATTEMPTS of the worker, for tasks of types that no worker has registered
    seen_at: Mapped[Stamp]


class TaskWorker(Base):
    """A worker that runs tasks: the queues that it consumes and the types that it knows. It is live if seen lately."""

    __tablename__ = "task_worker"

    worker: Mapped[str] = mapped_column(primary_key=True)
    queues: Mapped[list[str]]
    types: Mapped[list[str]]
    processes: Mapped[int | None]  # of its pool; None if the number cannot be changed while it runs
    topic: Mapped[str | None]  # of Kafka, from which its wake-ups come; null: from Celery's queues
    version: Mapped[str | None]  # of Celery and of Python
    started_at: Mapped[Stamp]
    seen_at: Mapped[Stamp]
