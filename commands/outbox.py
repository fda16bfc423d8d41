"""outbox: what waits to be published, what is dead, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commands import outbox_dead
from commands.output import age, camel, moment, print_json, print_table
from models.status import EventStatus

if TYPE_CHECKING:
    from outbox.backlog import Backlog


def register(app: typer.Typer) -> None:
    outbox = typer.Typer()
    outbox.callback(invoke_without_command=True)(show)
    outbox_dead.register(outbox)
    app.add_typer(outbox, name="outbox")


def show(
    context: typer.Context,
    *,
    status: Annotated[list[EventStatus] | None, typer.Option(help="List events of this status.")] = None,
    destination: Annotated[str | None, typer.Option(help="Of this destination only.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="With --status: at most so many.")] = 50,
    before: Annotated[int | None, typer.Option(help="With --status: the last id of the page before.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What waits, by destination; with --status, the events themselves, newest first.

    Example: `manage.py outbox --status DEAD --json`
    """
    if context.invoked_subcommand:
        return
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from outbox import backlog  # noqa: PLC0415

    with engine().connect() as connection:
        if not status:
            waiting = [each for each in backlog.backlog(connection) if destination in (None, each.destination)]
            _print_backlog(waiting, as_json)
            return
        found = backlog.events(connection, statuses=status, destination=destination, before=before, limit=limit)
    if as_json:
        print_json([camel(event) for event in found])
        return
    print_table(
        ("id", "destination", "status", "attempts", "created (UTC)", "due (UTC)", "last error"),
        [
            (
                str(event.id),
                event.destination,
                event.status,
                str(event.attempt_count),
                moment(event.created_at),
                moment(event.next_retry_at),
                (event.last_error or "").partition("\n")[0][:120],
            )
            for event in found
        ],
    )


def _print_backlog(waiting: list[Backlog], as_json: bool) -> None:
    if as_json:
        print_json([camel(each) for each in waiting])
        return
    print_table(
        ("destination", "due", "scheduled", "dead", "oldest due"),
        [
            (each.destination, _count(each.due), _count(each.scheduled), _count(each.dead), age(each.oldest_due))
            for each in waiting
        ],
    )


def _count(number: int) -> str:
    """Counting ends somewhere."""
    from outbox.backlog import CEILING  # noqa: PLC0415 - loads SQLAlchemy

    return f"{number:,}+" if number >= CEILING else f"{number:,}"
