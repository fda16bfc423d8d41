"""relay: publish due outbox events without beat."""

# ruff: noqa: PLC0415 - SQLAlchemy and Celery load slowly

from __future__ import annotations

import logging
from typing import Annotated, Final

import typer

from commands.interrupts import until_interrupted
from commands.output import console, print_json

logger = logging.getLogger(__name__)

PUBLISHED: Final = {"event": "events_published"}


def register(app: typer.Typer) -> None:
    app.command()(relay)


def relay(
    once: Annotated[bool, typer.Option("--once", help="Publish once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Publish due outbox events until Ctrl-C.

    Beat does the same; any number of relays may run at once. It serves its own metrics on WORKER_METRICS_PORT, if set.

    Example: `manage.py relay --once --json`
    """
    import settings
    from outbox.relay import Relay

    if not once:
        import metrics
        from tasks.core.logs import configure_logging

        configure_logging("info")
        if port := settings.current().worker_metrics_port:
            metrics.serve(port, settings.current().metrics_host)
    worker = Relay.of(settings.current())
    try:
        with until_interrupted() as stopped:
            while not stopped.is_set():
                ticked = worker.tick()
                if once and as_json:
                    print_json({"sent": ticked.sent, "failed": ticked.failed, "dead": ticked.dead})
                elif once:
                    console.print(f"sent {ticked.sent}, failed {ticked.failed}, dead {ticked.dead}")
                elif ticked.sent or ticked.failed or ticked.dead:
                    fields = {"sent": ticked.sent, "failed": ticked.failed, "dead": ticked.dead}
                    logger.info(
                        "sent %(sent)d, failed %(failed)d, dead %(dead)d", fields, extra={**fields, **PUBLISHED}
                    )
                if once:
                    break
                stopped.wait(ticked.next_in_seconds)
    finally:
        worker.close()
