"""handlers: list the task types that workers have registered."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from commands.options import Json
from commands.output import camel, console, print_json, print_table

if TYPE_CHECKING:
    from tasks.core.registered_types import RegisteredType


def register(app: typer.Typer) -> None:
    app.command()(handlers)


def handlers(as_json: Json = False) -> None:
    """List the task types that workers know: their queue, attempts, batch, priority, limits, and the live workers.

    Workers register their handlers in the ledger when they start. A type without a live worker can be submitted; its
    tasks wait.

    Example: `manage.py handlers --json`
    """
    from models.engine import engine
    from tasks.core.registered_types import registered_types

    with engine().connect() as connection:
        found = registered_types(connection)
    if as_json:
        print_json([camel(each) for each in found])
        return
    print_table(
        ("type", "queue", "attempts", "batch", "priority", "limits", "live workers"),
        [
            (
                each.type,
                each.queue,
                str(each.max_attempts),
                str(each.batch),
                str(each.priority),
                _limits(each),
                ", ".join(each.workers) or "none",
            )
            for each in found
        ],
    )
    if not found:
        console.print(
            "No worker has registered its handlers yet: start one with `celery -A tasks worker`.", markup=False
        )


def _limits(known: RegisteredType) -> str:
    parts = [known.rate, None if known.max_running is None else f"{known.max_running} running"]
    found = ", ".join(part for part in parts if part)
    return f"{found} per {known.limit_by}" if known.limit_by else found
