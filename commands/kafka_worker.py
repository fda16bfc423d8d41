"""kafka-worker: run the tasks whose wake-ups come from Kafka."""

# ruff: noqa: PLC0415 - settings and SQLAlchemy load slowly

from __future__ import annotations

from typing import Annotated, Literal

import typer

from commands.interrupts import until_interrupted
from home_files import SettingsError


def register(app: typer.Typer) -> None:
    app.command("kafka-worker")(kafka_worker)


def kafka_worker(
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="How many processes run tasks.")] = 1,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="What is logged.")
    ] = "info",
    child_of: Annotated[int, typer.Option("--child-of", hidden=True)] = 0,
) -> None:
    """Run tasks until Ctrl-C. Needs INGEST_QUEUE=kafka.

    At most one process per partition of the topic gets work, on all machines together. Beat and a Celery worker of the
    queue `system` must run too: they publish wake-ups and recover lost tasks.

    Example: `manage.py kafka-worker --processes 4`
    """
    import settings

    if settings.current().ingest_queue != "kafka":
        raise SettingsError("INGEST_QUEUE: wake-ups go to Celery; set it to kafka, also where tasks are submitted.")
    if child_of:
        from tasks.kafka.worker import work

        work(parent=child_of, level=log_level)
        return
    from models.schema import require_ready
    from tasks.core.logs import configure_logging
    from tasks.core.registry import handlers
    from tasks.kafka.client import make_consumer
    from tasks.kafka.worker_processes import WorkerProcesses

    make_consumer(settings.current()).close()  # report bad options once, not in every process
    require_ready(newer_is_ready=True)
    handlers()
    configure_logging(log_level)
    with until_interrupted() as stopped:
        code = WorkerProcesses(processes, level=log_level).run(stopped)
    if code:
        raise typer.Exit(code)
