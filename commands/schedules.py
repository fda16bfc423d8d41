"""schedules: list what runs periodically, pause and resume it, and run one now."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import Annotated, Final

import typer

from commands.confirmation import operator
from commands.options import Json, Reason
from commands.output import camel, console, format_time, format_time_utc, print_json
from commands.plain_lines import plain, print_lines
from commands.wakeups import publish_wakeups

LIST_HELP: Final = """List what runs periodically: rule, state, next run, and the task of the last run.

Workers declare the schedules of their handlers when they start.

States: active; paused by an operator; failing (its tasks cannot be submitted); no worker (no live worker has its
handler, and missed runs are caught up when one has); removed (the handler no longer has a schedule).

Example: `manage.py schedules --json`
"""
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule: the type of its handler.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer()
    group.callback(invoke_without_command=True, help=LIST_HELP)(schedules)
    group.command("list", help=LIST_HELP)(list_)
    group.command()(pause)
    group.command()(resume)
    group.command()(run)
    app.add_typer(group, name="schedules")


def schedules(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(as_json=as_json)


def list_(*, as_json: Json = False) -> None:
    from models.engine import engine
    from tasks.operations.schedules import ScheduleState, list_schedules

    with engine().connect() as connection:
        found = list_schedules(connection)
    if as_json:
        print_json([camel(each) for each in found])
        return
    print_lines(
        ("name", "rule", "time zone", "state", "next (UTC)", "last (UTC)", "last status", "last task"),
        [
            (
                each.name,
                each.rule,
                each.timezone,
                each.state,
                "" if each.state is ScheduleState.PAUSED else format_time(each.next_at),
                format_time(each.last_at),
                each.last_status or "",
                str(each.last_task_id or ""),
            )
            for each in found
        ],
    )
    for each in found:
        if each.error:
            console.print(f"{each.name} fails: {plain(each.error)}", markup=False)
        if each.paused_at:
            reason = f": {plain(each.paused_reason)}" if each.paused_reason else ""
            who = f"{each.paused_by} at {format_time_utc(each.paused_at)}{reason}"
            console.print(f"{each.name} was paused by {who}", markup=False)
    if not found:
        console.print("No worker has declared a schedule yet: see docs/handlers.md, Schedules.", markup=False)


def pause(name: Name, *, reason: Reason = None, as_json: Json = False) -> None:
    """Pause a schedule: no further tasks until you resume it. Tasks that exist already run.

    Example: `manage.py schedules pause report.nightly --reason "the warehouse is being moved"`
    """
    from models.engine import engine
    from tasks.operations.schedules import pause

    with engine().begin() as connection:
        pause(connection, name, actor=operator(), reason=reason)
    if as_json:
        print_json({"name": name, "paused": True})
    else:
        console.print(f"Paused {name}.", markup=False)


def resume(name: Name, *, as_json: Json = False) -> None:
    """Resume a schedule. Runs that were due during the pause are skipped; `schedules run` makes up for them.

    Example: `manage.py schedules resume report.nightly`
    """
    from models.engine import engine
    from tasks.operations.schedules import resume

    with engine().begin() as connection:
        next_at = resume(connection, name)
    if as_json:
        print_json({"name": name, "paused": False, "nextAt": next_at})
    else:
        console.print(f"Resumed {name}; next run: {format_time_utc(next_at) or 'never'}.", markup=False)


def run(name: Name, *, as_json: Json = False) -> None:
    """Submit one task of a schedule now, in addition to its planned runs. A paused one can be run, too.

    Example: `manage.py schedules run report.nightly`
    """
    from models.engine import engine
    from tasks.operations.schedules import run_now

    with publish_wakeups():
        done = run_now(engine(), name, actor=operator())
    if as_json:
        print_json({"taskId": done.task_id, "status": done.status, "created": done.created})
    else:
        console.print(f"Submitted {done.task_id}.", markup=False)
