"""kafka-worker: run tasks whose wake-ups come from Kafka."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

import settings
from commands.interrupts import until_interrupted
from settings import SettingsError


def register(app: typer.Typer) -> None:
    app.command("kafka-worker")(kafka_worker)


def kafka_worker(
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="How many run tasks at once.")] = 1,
    child_of: Annotated[int, typer.Option("--child-of", hidden=True)] = 0,
) -> None:
    """Run tasks until Ctrl-C, with INGEST_QUEUE=kafka. Start as many as the topic has partitions, anywhere.

    Beat and a Celery worker of the queue `system` are needed beside it: they publish, and bring back what was lost.

    Example: `manage.py kafka-worker --processes 4`
    """
    if settings.current().ingest_queue != "kafka":
        raise SettingsError("INGEST_QUEUE: wake-ups go to Celery; set it to kafka, for whoever submits too.")
    if child_of:
        from tasks.kafka.worker import work  # noqa: PLC0415 - loads SQLAlchemy

        work(parent=child_of)
        return
    from models.schema import require_ready  # noqa: PLC0415
    from tasks.core.logs import configure_logging  # noqa: PLC0415
    from tasks.core.registry import handlers  # noqa: PLC0415
    from tasks.kafka.client import make_consumer  # noqa: PLC0415
    from tasks.kafka.processes import Processes  # noqa: PLC0415

    make_consumer(settings.current()).close()  # what cannot be used is said once, and not by every process
    require_ready(newer_is_ready=True)
    handlers()
    configure_logging(logging.INFO)
    with until_interrupted() as stopped:
        code = Processes(processes).run(stopped)
    if code:
        raise typer.Exit(code)
