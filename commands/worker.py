"""worker: run tasks with the worker that INGEST_QUEUE asks for."""

# ruff: noqa: PLC0415 - settings, SQLAlchemy and Celery load slowly

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

import typer

PATIENCE_SECONDS: Final = 5.0


def register(app: typer.Typer) -> None:
    app.command()(worker)


def worker(
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="How many processes run tasks.")] = 2,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="What is logged.")
    ] = "warning",
    ping: Annotated[
        bool, typer.Option("--ping", help="Start nothing: exit with 1 if no worker answers on this machine.")
    ] = False,
) -> None:
    """Run tasks until Ctrl-C, with Celery's worker, or with `kafka-worker` if INGEST_QUEUE=kafka.

    It consumes every queue of INGEST_QUEUES. Beat and a worker of the queue `system` must run too.

    Example: `manage.py worker --processes 4`
    """
    import settings
    from embedded.worker_command import worker_command

    current = settings.current()
    if ping:
        if not (_kafka_worker_is_live() if current.ingest_queue == "kafka" else _celery_worker_answers()):
            raise typer.Exit(1)
        return
    command = worker_command(current, processes=processes, level=log_level)
    os.execv(command[0], command)  # noqa: S606 - signals reach the worker itself


def _celery_worker_answers() -> bool:
    from embedded.worker_command import NODE
    from tasks.celery import app
    from tasks.core.holders import HOST

    return bool(app.control.ping(destination=[f"{NODE}@{HOST}"], timeout=PATIENCE_SECONDS, limit=1))


def _kafka_worker_is_live() -> bool:
    """A consumer of Kafka cannot be asked, but it renews its row in the ledger."""
    import settings
    from models.engine import engine
    from tasks.core.holders import HOST
    from tasks.core.registered_types import live_workers

    topic = settings.current().kafka_topic
    with engine().connect() as connection:
        return any(each.topic == topic and each.worker.startswith(f"{HOST}:") for each in live_workers(connection))
