"""show: print one task, its history, and why it is not running."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands.options import TaskId
from commands.output import (
    camel,
    console,
    format_duration,
    format_time,
    format_time_utc,
    plural,
    print_json,
    print_table,
)
from commands.plain_lines import print_lines

if TYPE_CHECKING:
    from sinks.contract import Effect
    from tasks.operations.task_details import Details
    from tasks.operations.why_waiting import Reason

CUT_AT: Final = 500


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(
    task_id: TaskId,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the complete payload.")] = False,
) -> None:
    """Show a task: its state, its history, its messages, and why it is not running.

    Example: `manage.py show 01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60`
    """
    import settings
    from models.engine import engine
    from tasks.core.registry import handlers
    from tasks.operations.sink_effects import effects_of, sinks_by_type
    from tasks.operations.task_details import read_details
    from tasks.operations.why_waiting import reasons

    with engine().connect() as connection:
        found = read_details(connection, task_id)
        sinks = sinks_by_type(connection).get(found.task.type, ())
    effects = effects_of(task_id, found.task.status, sinks)
    why = reasons(found, settings.current(), known_types=handlers())
    if as_json:
        print_json(_json_of(found, why, effects))
    else:
        _print(found, why, effects)


def _json_of(found: Details, why: list[Reason], effects: list[Effect]) -> dict[str, Any]:
    return {
        **found.task.envelope(),
        "effects": [camel(effect) for effect in effects],
        "why": [camel(reason) for reason in why],
        "blocker": camel(found.blocker) if found.blocker else None,
        "transitions": [camel(each) for each in found.transitions],
        "lease": camel(found.lease) if found.lease else None,
        "wakeups": [camel(wakeup) for wakeup in found.wakeups],
        "audits": [camel(audit) for audit in found.audits],
    }


def _print(found: Details, why: list[Reason], effects: list[Effect]) -> None:
    print_table(("task", ""), [(name, value) for name, value in _fields(found) if value])
    console.print()
    print_table(
        ("why it is not running" if why[0].code != "running" else "running",), [(each.message,) for each in why]
    )
    if effects:
        console.print()
        print_table(
            ("effect in the sink", "step", "state", ""),
            [(each.sink, each.step or "", each.state, each.detail or "") for each in effects],
        )
    console.print()
    print_lines(
        ("at (UTC)", "from", "to", "failures", "by", "message"),
        [
            (
                format_time(each.created_at),
                each.from_status or "",
                each.to_status,
                str(each.attempt_count),
                each.actor,
                _cut(each.message or ""),
            )
            for each in found.transitions
        ],
    )
    if found.wakeups:
        console.print()
        print_table(
            ("wake-up in the outbox", "status", "failures", "due (UTC)", "held by", "last error"),
            [
                (
                    str(wakeup.id),
                    wakeup.status,
                    str(wakeup.attempt_count),
                    format_time(wakeup.next_retry_at or wakeup.created_at),
                    wakeup.locked_by or "",
                    _cut((wakeup.last_error or "").partition("\n")[0]),
                )
                for wakeup in found.wakeups
            ],
        )
    if found.audits:
        console.print()
        print_table(
            ("audit", "at (UTC)", "by", "detail"),
            [
                (each.code, format_time(each.created_at), each.worker_id, _cut(each.detail or ""))
                for each in found.audits
            ],
        )
    if found.task.last_error:
        console.print()
        print_lines(("last error",), [(line,) for line in found.task.last_error.splitlines()])


def _fields(found: Details) -> Iterator[tuple[str, str]]:
    task = found.task
    yield "id", str(task.task_id)
    yield "type", task.type
    yield "status", task.status
    yield "queue", f"{task.queue}, priority {task.priority}{', runs alone' if task.isolated else ''}"
    yield "idempotency key", task.idempotency_key or ""
    yield "partition key", task.partition_key or ""
    yield "expires", format_time_utc(task.expires_at)
    yield "failures", f"{task.attempt_count} of {task.max_attempts}"
    yield "due", format_time_utc(task.next_retry_at)
    yield "woken", format_time_utc(task.last_wakeup_at)
    yield "created", f"{format_time_utc(task.created_at)}, {format_duration(found.now - task.created_at)} ago"
    yield "changed", format_time_utc(task.updated_at)
    yield "finished", format_time_utc(task.finished_at)
    if found.lease:
        tasks = plural(found.lease.tasks, "task")
        yield "lease", f"{found.lease.holder} until {format_time_utc(found.lease.lease_until)}, {tasks}"
    yield "error", ": ".join(filter(None, (task.error_code, task.error_message)))
    yield "notify", task.notify or ""
    yield "payload", _cut(_written(task.payload))
    yield "context", _cut(_written(task.context)) if task.context else ""
    yield "result", _cut(_written(task.result)) if task.result is not None else ""


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= CUT_AT else f"{text[:CUT_AT]}… ({len(text):,} characters; --json prints all)"
