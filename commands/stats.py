"""stats: how many tasks there are, what waits and for how long, what died of what, and what changed last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commands.output import age, camel, console, moment, print_json, print_table
from commands.plain_lines import print_lines
from models.status import TaskStatus

if TYPE_CHECKING:
    from tasks.operations.stats import Stats


def register(app: typer.Typer) -> None:
    app.command()(stats)


def stats(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Count tasks by status, queue and type, with the oldest that is due, and the latest ones.

    A count of 100,000+ goes no further: of a long history the latest part is counted.

    Example: `manage.py stats --json | jq '.statuses[] | select(.status == "DEAD").count'`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations import stats as read  # noqa: PLC0415

    with engine().connect() as connection:
        found = read.stats(connection)
    if as_json:
        parts = ("statuses", "kinds", "dead", "latest")
        print_json({part: [camel(each) for each in getattr(found, part)] for part in parts})
    else:
        _print(found)


def _print(found: Stats) -> None:
    counts = [(each.status, f"{each.count:,}{'' if each.exact else '+'}") for each in found.statuses]
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
                    age(each.oldest_due),
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
            [(str(task.task_id), task.status, task.type, moment(task.changed_at)) for task in found.latest],
        )
