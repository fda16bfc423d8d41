"""kafka-worker: run the tasks whose wake-ups come from Kafka."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import settings
from commands.interrupts import until_interrupted
from settings import SettingsError


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
    if settings.current().ingest_queue != "kafka":
        raise SettingsError("INGEST_QUEUE: wake-ups go to Celery; set it to kafka, also where tasks are submitted.")
    if child_of:
        from tasks.kafka.worker import work  # noqa: PLC0415 - loads SQLAlchemy

        work(parent=child_of, level=log_level)
        return
    from models.schema import require_ready  # noqa: PLC0415
    from tasks.core.logs import configure_logging  # noqa: PLC0415
    from tasks.core.registry import handlers  # noqa: PLC0415
    from tasks.kafka.client import make_consumer  # noqa: PLC0415
    from tasks.kafka.worker_processes import WorkerProcesses  # noqa: PLC0415

    make_consumer(settings.current()).close()  # report bad options once, not in every process
    require_ready(newer_is_ready=True)
    handlers()
    configure_logging(log_level)
    with until_interrupted() as stopped:
        code = WorkerProcesses(processes, level=log_level).run(stopped)
    if code:
        raise typer.Exit(code)
