"""stats: count tasks by status, queue, type and error, and list the latest changes."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from commands.options import Json
from commands.output import camel, console, format_duration, format_time, print_json, print_table
from commands.plain_lines import print_lines
from models.status import TaskStatus

if TYPE_CHECKING:
    from tasks.operations.stats import Stats


def register(app: typer.Typer) -> None:
    app.command()(stats)


def stats(as_json: Json = False) -> None:
    """Count tasks by status, queue and type, show the age of the oldest due task, and list the latest changes.

    A count with ≈ is an estimate: counting stops at some thousand. Counts of queues and types are then lower limits.

    Example: `manage.py stats --json | jq '.statuses[] | select(.status == "DEAD").count'`
    """
    from models.engine import engine
    from tasks.operations import stats as read

    with engine().connect() as connection:
        found = read.read_stats(connection)
    if as_json:
        parts = ("statuses", "kinds", "dead", "latest")
        print_json({part: [camel(each) for each in getattr(found, part)] for part in parts})
    else:
        _print(found)


def _print(found: Stats) -> None:
    counts = [(each.status, f"{'' if each.exact else '≈ '}{each.count:,}") for each in found.statuses]
    print_table(("status", "tasks"), counts)
    if found.kinds:
        console.print()
        print_lines(
            ("queue", "type", *(status.lower() for status in TaskStatus), "due", "scheduled", "oldest due"),
            [
                (
                    each.queue,
                    each.type,
                    *(f"{each.counts[status]:,}" for status in TaskStatus),
                    f"{each.due:,}",
                    f"{each.scheduled:,}",
                    format_duration(each.oldest_due),
                )
                for each in found.kinds
            ],
        )
    if found.dead:
        console.print()
        print_table(("dead type", "error", "tasks"), [(e.type, e.error_code or "", f"{e.count:,}") for e in found.dead])
    if found.latest:
        console.print()
        print_lines(
            ("latest", "status", "type", "changed (UTC)"),
            [(str(task.task_id), task.status, task.type, format_time(task.changed_at)) for task in found.latest],
        )
