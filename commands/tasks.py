"""tasks: lists of tasks, by filters, page by page."""

from __future__ import annotations

from typing import Annotated

import typer

from commands import times
from commands.output import camel, console, moment, print_json
from commands.plain_lines import print_lines
from models.status import TaskStatus


def register(app: typer.Typer) -> None:
    app.command()(tasks)


def tasks(
    *,
    status: Annotated[
        list[TaskStatus] | None, typer.Option(case_sensitive=False, help="Of this status; may be given several times.")
    ] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Of this type only.")] = None,
    queue: Annotated[str | None, typer.Option(help="Of this queue only.")] = None,
    key: Annotated[str | None, typer.Option(help="With this key; quick if --type is given, too.")] = None,
    since: Annotated[str | None, typer.Option(help=f"Last changed since {times.HELP}.")] = None,
    until: Annotated[str | None, typer.Option(help=f"Last changed before {times.HELP}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    before: Annotated[str | None, typer.Option(help="Older ones than this place, which a page ends with.")] = None,
    after: Annotated[str | None, typer.Option(help="Newer ones than this place.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List tasks, the latest change first.

    Example: `manage.py tasks --status DEAD --type invoice.import --since 2h`
    """
    from models.clock import resolved  # noqa: PLC0415 - loads SQLAlchemy
    from models.engine import engine  # noqa: PLC0415
    from tasks.operations.listing import Cursor, Wanted, listed  # noqa: PLC0415

    start, end = times.moment(since), times.moment(until)
    places = (Cursor.parse(before) if before else None, Cursor.parse(after) if after else None)
    with engine().connect() as connection:
        wanted = Wanted(status or (), type_, queue, key, resolved(start, connection), resolved(end, connection))
        found = listed(connection, wanted, before=places[0], after=places[1], limit=limit)
    is_full = len(found) == limit
    if as_json:
        older = str(found[-1].cursor) if found and is_full else None
        newer = str(found[0].cursor) if found else None
        print_json({"tasks": [camel(task) for task in found], "before": older, "after": newer})
        return
    print_lines(
        ("id", "status", "type", "queue", "attempts", "changed (UTC)", "due (UTC)", "error"),
        [
            (
                str(task.task_id),
                task.status,
                task.type,
                task.queue,
                f"{task.attempt_count} of {task.max_attempts}",
                moment(task.changed_at),
                moment(task.next_retry_at) if task.status in ("QUEUED", "RETRYING") else "",
                (task.error_message or "")[:120],
            )
            for task in found
        ],
    )
    if is_full:
        console.print(f"older ones: --before {found[-1].cursor}", markup=False)
