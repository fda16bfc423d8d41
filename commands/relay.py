"""relay: publish due outbox events without beat."""

# ruff: noqa: PLC0415 - SQLAlchemy and Celery load slowly

from __future__ import annotations

from typing import Annotated

import typer

import settings
from commands.interrupts import until_interrupted
from commands.output import console, print_json


def register(app: typer.Typer) -> None:
    app.command()(relay)


def relay(
    once: Annotated[bool, typer.Option("--once", help="Publish once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Publish due outbox events until Ctrl-C.

    Beat does the same; any number of relays may run at once.

    Example: `manage.py relay --once --json`
    """
    from outbox.relay import Relay

    worker = Relay.of(settings.current())
    try:
        with until_interrupted() as stopped:
            while not stopped.is_set():
                ticked = worker.tick()
                if once and as_json:
                    print_json({"sent": ticked.sent, "failed": ticked.failed, "dead": ticked.dead})
                elif once or ticked.sent or ticked.failed or ticked.dead:
                    console.print(f"sent {ticked.sent}, failed {ticked.failed}, dead {ticked.dead}")
                if once:
                    break
                stopped.wait(ticked.next_in_seconds)
    finally:
        worker.close()
