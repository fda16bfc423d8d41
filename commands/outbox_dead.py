"""outbox requeue-dead, outbox discard-dead: what an operator does with dead events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from commands import times
from commands.confirmation import operator, require_consent
from commands.output import camel, console, on_stderr, print_json, print_table, with_progress

if TYPE_CHECKING:
    from rich.console import Console

    from outbox.dead_events import Choice, DeadCount

Ids = Annotated[list[int] | None, typer.Option("--id", help="This event; may be given several times.")]
Destination = Annotated[str | None, typer.Option(help="Of this destination only.")]
Error = Annotated[str | None, typer.Option(help="Whose last error contains this text.")]
Since = Annotated[str | None, typer.Option(help=f"Created since {times.HELP}.")]
Until = Annotated[str | None, typer.Option(help=f"Created before {times.HELP}.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest first.")]
Reason = Annotated[str | None, typer.Option(help="Kept in the audit, with your name.")]
Everything = Annotated[bool, typer.Option("--all", help="Without a filter: all of them, unasked.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many, by destination and error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("requeue-dead")(requeue_dead)
    app.command("discard-dead")(discard_dead)


def requeue_dead(
    *,
    ids: Ids = None,
    destination: Destination = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    reason: Reason = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Publish dead events after all: attempts start again, the audit keeps their history.

    Example: `manage.py outbox requeue-dead --destination orders --since 2h --dry-run`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from outbox.dead_events import requeue  # noqa: PLC0415

    choice = _choice(ids, destination, error, since, until)
    if total := _agreed_total("requeue", choice, limit, everything=everything, dry_run=dry_run, as_json=as_json):
        _do("requeued", requeue(engine(), choice, actor=operator(), reason=reason, limit=limit), total, as_json=as_json)


def discard_dead(
    *,
    ids: Ids = None,
    destination: Destination = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    reason: Reason = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give dead events up: they are deleted, their audit stays, and what waited behind them goes on.

    Example: `manage.py outbox discard-dead --id 17 --reason "sent by hand"`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from outbox.dead_events import discard  # noqa: PLC0415

    choice = _choice(ids, destination, error, since, until)
    if total := _agreed_total("discard", choice, limit, everything=everything, dry_run=dry_run, as_json=as_json):
        _do(
            "discarded", discard(engine(), choice, actor=operator(), reason=reason, limit=limit), total, as_json=as_json
        )


def _choice(
    ids: list[int] | None, destination: str | None, error: str | None, since: str | None, until: str | None
) -> Choice:
    from models.clock import resolved  # noqa: PLC0415 - loads SQLAlchemy
    from models.engine import engine  # noqa: PLC0415
    from outbox.dead_events import Choice  # noqa: PLC0415

    after, before = times.moment(since), times.moment(until)
    with engine().connect() as connection:
        return Choice(ids or None, destination, error, resolved(after, connection), resolved(before, connection))


def _agreed_total(
    verb: str, choice: Choice, limit: int | None, *, everything: bool, dry_run: bool, as_json: bool
) -> int:
    """How many it will be; 0 after a dry run. Prints what is chosen; beside JSON only before a question, on stderr."""
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from outbox.dead_events import count  # noqa: PLC0415

    with engine().connect() as connection:
        found = count(connection, choice, limit=limit)
    total = sum(each.count for each in found)
    if dry_run and as_json:
        print_json({"total": total, "dryRun": True, "groups": [camel(each) for each in found]})
    elif not as_json:
        _print_counts(found, total, on=console)
    if dry_run or not total:
        if as_json and not dry_run:
            print_json({"done": 0})
        return 0
    if as_json and choice.is_all and not everything:
        _print_counts(found, total, on=on_stderr)
    question = f"{verb.capitalize()} {total:,} events?"
    require_consent(question, chosen=not choice.is_all, everything=everything, as_json=as_json)
    return total


def _print_counts(found: list[DeadCount], total: int, *, on: Console) -> None:
    if not found:
        on.print("No dead event is chosen.")
        return
    rows = [(each.destination, each.error, f"{each.count:,}") for each in found]
    print_table(("destination", "error", "events"), rows, on=on)
    on.print(f"chosen: {total:,}")


def _do(what: str, batches: Iterator[int], total: int, *, as_json: bool) -> None:
    done = with_progress(batches, total=total, what=what)
    if as_json:
        print_json({"done": done})
    else:
        console.print(f"{what}: {done:,}")
