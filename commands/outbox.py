"""outbox: list the events that wait to be published; requeue or discard dead ones."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commands import dead, times
from commands.dead import DryRun, Limit, Options, Rate
from commands.options import Destination, Json, Reason
from commands.output import camel, format_duration, format_time, print_json, print_table
from models.status import EventStatus

if TYPE_CHECKING:
    from outbox.backlog import Backlog

Ids = Annotated[list[int] | None, typer.Option("--id", metavar="ID", help="Only this event. Repeat it for several.")]
Error = Annotated[str | None, typer.Option(help="Only events whose last error contains this text.")]
Since = Annotated[str | None, typer.Option(metavar="TIME", help=f"Created since {times.HELP}.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help=f"Created before {times.HELP}.")]
Everything = Annotated[bool, typer.Option("--all", help="Act on every dead event.")]

REQUEUE_HELP: Final = """Publish dead events again.

Attempts start again at zero, and the audit table keeps the history. Ctrl-C stops between two batches.

Example: `manage.py outbox requeue-dead --destination orders --since 2h --dry-run`
"""
DISCARD_HELP: Final = """Delete dead events.

The audit table keeps a record of them. Events that waited behind them in order are published. Ctrl-C stops between
two batches.

Example: `manage.py outbox discard-dead --id 17 --reason "sent by hand"`
"""


def register(app: typer.Typer) -> None:
    outbox = typer.Typer()
    outbox.callback(invoke_without_command=True)(show)
    outbox.command("requeue-dead", help=REQUEUE_HELP)(_dead_events_command("requeue"))
    outbox.command("discard-dead", help=DISCARD_HELP)(_dead_events_command("discard"))
    app.add_typer(outbox, name="outbox")


def show(
    context: typer.Context,
    *,
    status: Annotated[list[EventStatus] | None, typer.Option(help="List the events with this status.")] = None,
    destination: Destination = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="With --status: list at most this many.")] = 50,
    before: Annotated[
        int | None, typer.Option(metavar="ID", help="With --status: list events older than this one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the events that wait, by destination. With --status, list events, newest first.

    Example: `manage.py outbox --status DEAD --json`
    """
    if context.invoked_subcommand:
        return
    from models.engine import engine
    from outbox import backlog

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
        ("id", "destination", "status", "failures", "created (UTC)", "due (UTC)", "last error"),
        [
            (
                str(event.id),
                event.destination,
                event.status,
                str(event.attempt_count),
                format_time(event.created_at),
                format_time(event.next_retry_at),
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
            (
                each.destination,
                _count(each.due),
                _count(each.scheduled),
                _count(each.dead),
                format_duration(each.oldest_due),
            )
            for each in waiting
        ],
    )


def _count(number: int) -> str:
    """Return the number, with a `+` where counting stopped."""
    from outbox.backlog import CEILING

    return f"{number:,}+" if number >= CEILING else f"{number:,}"


def _dead_events_command(verb: str) -> Callable[..., None]:
    def command(
        *,
        ids: Ids = None,
        destination: Destination = None,
        error: Error = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = None,
        rate: Rate = None,
        reason: Reason = None,
        everything: Everything = False,
        dry_run: DryRun = False,
        as_json: Json = False,
    ) -> None:
        from outbox import dead_events

        choice = dead_events.Choice(ids or None, destination, error, *times.bounds(since, until))
        act = dead_events.requeue if verb == "requeue" else dead_events.discard
        target = dead.Target("event", f"outbox {verb}-dead", choice, dead_events.count, act)
        dead.run(target, Options(limit, rate, reason, everything, dry_run, as_json))

    return command
