"""requeue-dead, discard-dead, discard, retry-now: run tasks again, or give them up."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands import dead, times
from commands.complaint import complain
from commands.confirmation import operator
from commands.dead import Canary, DryRun, Limit, Options, Rate
from commands.options import Json, Queue, Reason, TaskId, Type
from commands.output import console, plural, print_json
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from tasks.operations.dead_tasks import Choice
    from tasks.operations.sink_effects import EffectCount

MOST_ASKED: Final = 200  # tasks whose sinks are asked before the question
Ids = Annotated[
    list[uuid.UUID] | None, typer.Option("--id", metavar="ID", help="Only this task. Repeat it for several.")
]
ErrorCode = Annotated[str | None, typer.Option(help="Only this error: handler_error, worker_lost, timeout, ….")]
Since = Annotated[str | None, typer.Option(metavar="TIME", help=f"Died since {times.HELP}.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help=f"Died before {times.HELP}.")]
Everything = Annotated[bool, typer.Option("--all", help="Act on every dead task.")]


def register(app: typer.Typer) -> None:
    app.command("requeue-dead")(requeue_dead)
    app.command("discard-dead")(discard_dead)
    app.command("discard")(discard_one)
    app.command("retry-now")(retry_now)


def requeue_dead(
    *,
    ids: Ids = None,
    type_: Type = None,
    error_code: ErrorCode = None,
    queue: Queue = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    rate: Rate = None,
    reason: Reason = None,
    canary: Annotated[
        int | None, typer.Option(min=1, help="Requeue this many first, and the others only if these succeed.")
    ] = None,
    canary_timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the canaries.")] = 300.0,
    reset_steps: Annotated[
        bool, typer.Option("--reset-steps", help="Run the steps again that were already done.")
    ] = False,
    accept_duplicates: Annotated[
        bool,
        typer.Option("--accept-duplicates", help="Also those whose sinks no longer remember their effects."),
    ] = False,
    everything: Everything = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run dead tasks again.

    Attempts start again at zero, and the history stays. Ctrl-C stops between two batches. For tasks that use sinks,
    it first prints what they have done there. A task that is older than the key life of one of its sinks is left
    unchanged, because that sink could not recognise a repeated effect.

    Example: `manage.py requeue-dead --type invoice.import --since 2h --canary 5 --rate 50/s`
    """
    from tasks.operations import dead_tasks

    choice = dead_tasks.Choice(ids or None, type_, queue, error_code, *times.bounds(since, until))
    if not accept_duplicates:
        choice = _without_forgotten(choice)
    act = partial(dead_tasks.requeue, reset_steps=reset_steps)
    options = Options(limit, rate, reason, everything, dry_run, as_json)
    _run("requeue-dead", choice, act, options, Canary(canary, canary_timeout) if canary else None)


def discard_dead(
    *,
    ids: Ids = None,
    type_: Type = None,
    error_code: ErrorCode = None,
    queue: Queue = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    rate: Rate = None,
    reason: Reason = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give up dead tasks.

    Their status becomes DISCARDED, and they are deleted when their retention is over. Ctrl-C stops between two batches.

    Example: `manage.py discard-dead --error-code permanent --until 30d --reason "the orders are cancelled"`
    """
    from tasks.operations import dead_tasks

    choice = dead_tasks.Choice(ids or None, type_, queue, error_code, *times.bounds(since, until))
    _run("discard-dead", choice, dead_tasks.discard, Options(limit, rate, reason, everything, dry_run, as_json))


def discard_one(task_id: TaskId, reason: Reason = None, as_json: Json = False) -> None:
    """Cancel a task, even while it runs.

    A running handler is stopped, and nothing that it did inside its transaction is saved.

    Example: `manage.py discard 01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60 --reason "sent by mistake"`
    """
    from models.engine import engine
    from tasks.operations.discard import discard

    with publish_wakeups():
        was = discard(engine(), task_id, actor=operator(), reason=reason)
    _print_change(task_id, was, "is now DISCARDED", as_json=as_json)


def retry_now(task_id: TaskId, reason: Reason = None, as_json: Json = False) -> None:
    """Run a task now that waits for its next attempt, is scheduled for later, or is dead.

    Example: `manage.py retry-now 01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60`
    """
    from models.engine import engine
    from tasks.operations.retry_now import retry_now as make_due

    with publish_wakeups():
        was = make_due(engine(), task_id, actor=operator(), reason=reason)
        if was == "DEAD":
            _sync_dead_letters()
    _print_change(task_id, was, "is due now", as_json=as_json)


def _print_change(task_id: uuid.UUID, was: str, now: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"taskId": task_id, "was": was})
    else:
        console.print(f"{task_id} was {was} and {now}.")


def _run(command: str, choice: Choice, act: Any, options: Options, canary: Canary | None = None) -> None:
    from tasks.operations.dead_tasks import count

    target = dead.Target("task", command, choice, count, act, partial(_effects, choice, options.limit))
    dead.run(target, options, canary=canary, finish=_sync_dead_letters)


def _without_forgotten(choice: Choice) -> Choice:
    """Leave out tasks whose sinks have deleted their keys, and say so."""
    from models.engine import engine
    from tasks.operations.dead_tasks import count
    from tasks.operations.sink_effects import key_lives

    with engine().connect() as connection:
        younger = choice.younger_than(key_lives(connection))
        left_out = count(connection, choice).total - count(connection, younger).total if younger != choice else 0
    if left_out:
        complain(
            f"{plural(left_out, 'task')} left unchanged: older than the key life of a sink, which could not recognise "
            "repeated effects. --accept-duplicates requeues them, too."
        )
    return younger


def _effects(choice: Choice, limit: int | None) -> list[EffectCount]:
    """Count what the first of the chosen tasks have done in sinks."""
    from models.engine import engine
    from tasks.operations.dead_tasks import chosen_tasks
    from tasks.operations.sink_effects import count_effects, sinks_by_type

    with engine().connect() as connection:
        if not (sinks := sinks_by_type(connection)):
            return []
        chosen = chosen_tasks(connection, choice, limit=min(limit or MOST_ASKED, MOST_ASKED))
    return count_effects(chosen, sinks)


def _sync_dead_letters() -> dict[str, Any]:
    """Update the dead-letter queue. If the broker is unreachable, only warn: the next prune tick updates the queue."""
    import settings
    from models.engine import engine
    from models.errors import Unreachable
    from tasks.operations import dead_letter_queue

    try:
        return {"letters": dead_letter_queue.sync(engine(), settings.current())}
    except Unreachable as error:
        complain(f"The dead-letter queue is not up to date yet. {error.message}")
        return {"letters": None}
