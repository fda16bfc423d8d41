"""relay: publish what is due, without beat."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

import settings
from commands.output import console, print_json


def register(app: typer.Typer) -> None:
    app.command()(relay)


def relay(
    once: Annotated[bool, typer.Option("--once", help="One tick, then end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Publish due events until Ctrl-C. Any number of relays may run beside beat's.

    Example: `manage.py relay --once --json`
    """
    from outbox.relay import Relay  # noqa: PLC0415 - loads SQLAlchemy and Celery

    worker = Relay.of(settings.current())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
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
