"""requeue-dead, discard-dead, discard, retry-now: what an operator does with tasks that died, wait or run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import settings
from commands import rate as rates
from commands import times
from commands.confirmation import operator, require_consent
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import camel, complain, console, on_stderr, print_json, print_table, with_progress
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from rich.console import Console

    from tasks.operations.dead_tasks import Choice, Counted
    from tasks.operations.wait_final import Statuses

SHOWN: Final = 20

Ids = Annotated[list[uuid.UUID] | None, typer.Option("--id", help="This task; may be given several times.")]
Type = Annotated[str | None, typer.Option("--type", help="Of this type only.")]
ErrorCode = Annotated[str | None, typer.Option(help="Dead of this error: handler_error, worker_lost, timeout, ….")]
Queue = Annotated[str | None, typer.Option(help="Of this queue only.")]
Since = Annotated[str | None, typer.Option(help=f"Dead since {times.HELP}.")]
Until = Annotated[str | None, typer.Option(help=f"Dead before {times.HELP}.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many, the longest dead first.")]
Rate = Annotated[str | None, typer.Option(help=f"Not faster than {rates.HELP}.")]
Reason = Annotated[str | None, typer.Option(help="Kept in the history of each task, with your name.")]
Everything = Annotated[bool, typer.Option("--all", help="Without a filter: all of them, unasked.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many, by type and error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    canary: Annotated[int | None, typer.Option(min=1, help="So many first; the others if these succeed.")] = None,
    canary_timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the canaries.")] = 300.0,
    reset_steps: Annotated[bool, typer.Option("--reset-steps", help="Forget the steps they have done.")] = False,
    everything: Everything = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run dead tasks again: attempts start again, the history stays. Ctrl-C stops between two batches.

    Example: `manage.py requeue-dead --type invoice.import --since 2h --canary 5 --rate 50/s`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.dead_tasks import BATCH, requeue  # noqa: PLC0415
    from tasks.operations.wait_final import all_succeeded  # noqa: PLC0415

    per_second = rates.rate(rate)
    choice = _choice(ids=ids, type_=type_, queue=queue, error_code=error_code, since=since, until=until)
    total = _agreed_total("requeue", choice, limit, everything=everything, dry_run=dry_run, as_json=as_json)
    if not total:
        return
    requeued = partial(requeue, engine(), choice, actor=operator(), reason=reason, reset_steps=reset_steps)
    done, outcome = 0, None
    with until_interrupted() as stopped, publish_wakeups():
        if canary is not None:
            first = [id_ for batch in requeued(limit=min(canary, total)) for id_ in batch]
            done, outcome = len(first), _watched(first, seconds=canary_timeout, stopped=stopped)
        if outcome is None or all_succeeded(outcome):
            step = rates.smooth_batch(per_second, BATCH)
            rest = requeued(limit=total - done, batch=step)
            done += _with_progress("requeued", rest, total - done, per_second, stopped)
        result = _Result("requeued", done, total, _sync_letters(), outcome)
    _end(result, is_interrupted=stopped.is_set(), as_json=as_json)


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
    """Give dead tasks up: they are DISCARDED, and pruned some day. Ctrl-C stops between two batches.

    Example: `manage.py discard-dead --error-code permanent --until 30d --reason "the orders are cancelled"`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.dead_tasks import BATCH, discard  # noqa: PLC0415

    per_second = rates.rate(rate)
    choice = _choice(ids=ids, type_=type_, queue=queue, error_code=error_code, since=since, until=until)
    total = _agreed_total("discard", choice, limit, everything=everything, dry_run=dry_run, as_json=as_json)
    if not total:
        return
    step = rates.smooth_batch(per_second, BATCH)
    with until_interrupted() as stopped:
        batches = discard(engine(), choice, actor=operator(), reason=reason, limit=total, batch=step)
        done = _with_progress("discarded", batches, total, per_second, stopped)
        result = _Result("discarded", done, total, _sync_letters())
    _end(result, is_interrupted=stopped.is_set(), as_json=as_json)


def discard_one(
    task_id: Annotated[uuid.UUID, typer.Argument(metavar="ID", help="The id of a task.")],
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Give up one task that waits, is dead, or runs: a running handler is stopped, and nothing of it is written.

    Example: `manage.py discard 01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60 --reason "sent by mistake"`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.discard import discard  # noqa: PLC0415

    with publish_wakeups():
        done = discard(engine(), task_id, actor=operator(), reason=reason)
    if as_json:
        print_json(camel(done))
    else:
        console.print(f"{done.task_id} was {done.was}, and is DISCARDED.")


def retry_now(
    task_id: Annotated[uuid.UUID, typer.Argument(metavar="ID", help="The id of a task.")],
    reason: Annotated[str | None, typer.Option(help="Kept with your name.")] = None,
    as_json: Json = False,
) -> None:
    """Run a task now that waits for its next attempt, is scheduled for later, or is dead.

    Example: `manage.py retry-now 01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.retry_now import retry_now as hurry  # noqa: PLC0415

    with publish_wakeups():
        hurried = hurry(engine(), task_id, actor=operator(), reason=reason)
        if hurried.was == "DEAD":
            _sync_letters()
    if as_json:
        print_json(camel(hurried))
    else:
        console.print(f"{hurried.task_id} was {hurried.was} and is due now.")


def _choice(
    *,
    ids: list[uuid.UUID] | None,
    type_: str | None,
    queue: str | None,
    error_code: str | None,
    since: str | None,
    until: str | None,
) -> Choice:
    from models.clock import resolved  # noqa: PLC0415 - loads SQLAlchemy
    from models.engine import engine  # noqa: PLC0415
    from tasks.operations.dead_tasks import Choice  # noqa: PLC0415

    after, before = times.moment(since), times.moment(until)
    with engine().connect() as connection:
        bounds = resolved(after, connection), resolved(before, connection)
    return Choice(ids or None, type_, queue, error_code, *bounds)


def _agreed_total(
    verb: str, choice: Choice, limit: int | None, *, everything: bool, dry_run: bool, as_json: bool
) -> int:
    """How many it will be; 0 after a dry run. Prints what is chosen; beside JSON only before a question, on stderr."""
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.dead_tasks import count  # noqa: PLC0415

    with engine().connect() as connection:
        found = count(connection, choice, limit=limit)
    total = found.total
    if dry_run and as_json:
        print_json({"total": total, "dryRun": True, "groups": [camel(each) for each in found.groups]})
    elif not as_json:
        _print_counted(found, on=console)
    if dry_run or not total:
        if as_json and not dry_run:
            print_json({"done": 0, "total": 0})
        return 0
    if choice.is_all and not everything:
        if as_json:
            _print_counted(found, on=on_stderr)
        if not sys.stdin.isatty():
            complain(f"Nothing was changed: give a filter. For all of them: manage.py {verb}-dead --all")
            raise typer.Exit(2)
    question = f"{verb.capitalize()} {total:,} tasks?"
    require_consent(question, chosen=not choice.is_all, everything=everything, as_json=as_json)
    return total


def _print_counted(found: Counted, *, on: Console) -> None:
    if not found.total:
        on.print("No dead task is chosen.")
        return
    print_table(
        ("type", "error", "message", "tasks"),
        [
            (each.type, each.error_code or "", (each.error_message or "")[:120], f"{each.count:,}")
            for each in found.groups[:SHOWN]
        ],
        on=on,
    )
    others = found.total - sum(each.count for each in found.groups[:SHOWN])
    on.print(f"chosen: {found.total:,}" + (f" ({others:,} with other errors)" if others else ""))


def _with_progress(
    what: str, batches: Iterator[list[uuid.UUID]], total: int, per_second: float | None, stopped: Event
) -> int:
    """Whatever ends it early, it says how far it got."""
    done = 0

    def steps() -> Iterator[int]:
        nonlocal done
        for so_far in rates.paced(batches, total=total, per_second=per_second, stopped=stopped):
            done = so_far
            yield so_far

    try:
        return with_progress(steps(), total=total, what=what)
    except Exception:
        complain(f"Stopped: {what} {done:,} of {total:,}. It is safe to run it again.")
        raise


def _watched(ids: list[uuid.UUID], *, seconds: float, stopped: Event) -> Statuses:
    """What became of the canaries."""
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy
    from tasks.operations.wait_final import Statuses, in_words, watch  # noqa: PLC0415

    statuses: Statuses = Statuses()
    with on_stderr.status("canaries …") as shown:
        for statuses in watch(engine(), ids, seconds=seconds, stopped=stopped):
            shown.update(f"canaries: {in_words(statuses)}")
    return statuses


def _sync_letters() -> int | None:
    """The queue of dead letters follows. A broker that is away is no failure: the next prune tick comes after it."""
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy and Celery
    from models.errors import Unreachable  # noqa: PLC0415
    from tasks import broker  # noqa: PLC0415
    from tasks.operations import dead_letter_queue  # noqa: PLC0415

    try:
        return dead_letter_queue.sync(engine(), settings.current(), depths=broker.depths, purge=broker.purge)
    except Unreachable as error:
        complain(f"The queue of dead letters is not up to date yet. {error.message}")
        return None


@dataclass(frozen=True, slots=True)
class _Result:
    what: str
    done: int
    total: int
    letters: int | None  # written anew; None: the broker is away
    canary: Statuses | None = None


def _end(result: _Result, *, is_interrupted: bool, as_json: bool) -> None:
    from tasks.operations.wait_final import all_succeeded, in_words  # noqa: PLC0415 - loads SQLAlchemy

    if as_json:
        shown: dict[str, Any] = {"done": result.done, "total": result.total, "letters": result.letters}
        if result.canary is not None:
            shown["canary"] = {status or "gone": number for status, number in result.canary.items()}
        print_json(shown)
    else:
        console.print(f"{result.what}: {result.done:,} of {result.total:,}")
    left = result.total - result.done
    if is_interrupted:
        complain(f"Interrupted: {left:,} were left as they are. It is safe to run it again.")
        raise typer.Exit(INTERRUPTED)
    if result.canary is not None and not all_succeeded(result.canary):
        fate = in_words(result.canary) or "somebody else had them"
        complain(f"Not all canaries succeeded: {fate}. {left:,} others were left as they are.")
        raise typer.Exit(1)
    if left:
        complain(f"{left:,} were changed by somebody else meanwhile.")
