"""tasks: list tasks by filters, page by page."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import Annotated, Final

import typer

from commands import times
from commands.options import Json, Queue, Type
from commands.output import camel, console, format_time, print_json
from commands.plain_lines import print_lines
from models.status import STATUS_ALIASES, TaskStatus, parse_task_status

_STATUSES: Final = ", ".join(TaskStatus)
_ALIASES: Final = ", ".join(f"{alias} ({status})" for alias, status in STATUS_ALIASES.items())


def _parse_status(given: str) -> TaskStatus:
    try:
        return parse_task_status(given)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


def register(app: typer.Typer) -> None:
    app.command()(tasks)


def tasks(
    *,
    status: Annotated[
        list[TaskStatus] | None,
        typer.Option(
            parser=_parse_status,
            metavar="STATUS",
            help=f"Only tasks with this status: {_STATUSES}; or {_ALIASES}. Repeat it for several.",
        ),
    ] = None,
    type_: Type = None,
    queue: Queue = None,
    key: Annotated[
        str | None, typer.Option(help="Only tasks with this idempotency key; fast together with --type.")
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Last changed since {times.HELP}.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help=f"Last changed before {times.HELP}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="List at most this many.")] = 50,
    before: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Next page: the cursor printed below the previous page.")
    ] = None,
    after: Annotated[str | None, typer.Option(metavar="CURSOR", help="Tasks newer than this cursor.")] = None,
    as_json: Json = False,
) -> None:
    """List tasks, the latest change first.

    Example: `manage.py tasks --status DEAD --type invoice.import --since 2h`
    """
    from models.engine import engine
    from tasks.operations.listing import Cursor, TaskFilter, list_tasks

    cursors = (Cursor.parse(before) if before else None, Cursor.parse(after) if after else None)
    wanted = TaskFilter(status or (), type_, queue, key, *times.bounds(since, until))
    with engine().connect() as connection:
        found = list_tasks(connection, wanted, before=cursors[0], after=cursors[1], limit=limit)
    is_full = len(found) == limit
    if as_json:
        older = str(found[-1].cursor) if found and is_full else None
        newer = str(found[0].cursor) if found else None
        print_json({"tasks": [camel(task) for task in found], "before": older, "after": newer})
        return
    print_lines(
        ("id", "status", "type", "queue", "failures", "changed (UTC)", "due (UTC)", "error"),
        [
            (
                str(task.task_id),
                task.status,
                task.type,
                task.queue,
                f"{task.attempt_count} of {task.max_attempts}",
                format_time(task.changed_at),
                format_time(task.next_retry_at) if task.status in ("QUEUED", "RETRYING") else "",
                (task.error_message or "")[:120],
            )
            for task in found
        ],
    )
    if is_full:
        console.print(f"next page: --before {found[-1].cursor}", markup=False)
