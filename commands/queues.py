"""queues, pause, resume, scale: look at queues, and let an operator hold them or give them more processes."""

# ruff: noqa: PLC0415 - SQLAlchemy and Celery load slowly

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commands.confirmation import operator
from commands.options import Json, Reason
from commands.output import (
    camel,
    console,
    format_duration,
    format_time_utc,
    plural,
    print_json,
    print_table,
    with_progress,
)
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from tasks.operations.pauses import QueuePause
    from tasks.operations.queue_list import ListedQueue
    from tasks.operations.scale import WorkerSize

SCALE_PATIENCE_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.2
Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of the queue.")]


def register(app: typer.Typer) -> None:
    app.command()(queues)
    app.command()(pause)
    app.command()(resume)
    app.command()(scale)


def queues(as_json: Json = False) -> None:
    """List the queues: messages in the broker, due and running tasks, pauses, alerts, workers, and the dead letters.

    Example: `manage.py queues --json | jq '.queues[] | select(.pause).queue'`
    """
    import settings
    from models.engine import engine
    from tasks.operations.queue_list import list_queues, show_queues

    with engine().connect() as connection:
        found = list_queues(connection, settings.current())
    if as_json:
        print_json(show_queues(found))
        return
    print_table(
        ("queue", "messages", "due", "oldest due", "running", "dead", "processes", "state"),
        [
            (
                each.queue,
                _number(each.messages),
                f"{each.due:,}{'' if each.due_is_exact else '+'}",
                format_duration(each.oldest_due),
                f"{each.running:,}",
                f"{each.dead:,}",
                _processes(each),
                "; ".join(_state(each)) or "open",
            )
            for each in found.queues
        ],
    )
    if found.dlq:
        console.print(f"\ndead letters in {found.dlq}: {_number(found.dlq_messages)}", markup=False)


def pause(
    queue: Name,
    intake: Annotated[
        bool, typer.Option("--intake", help="Refuse new tasks instead; those that the queue has still run.")
    ] = False,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Let no further task of a queue start, until `resume`. Tasks that run are not interrupted.

    The pause is kept in the ledger: it holds for all workers and survives restarts. With --intake, new tasks are
    refused instead (HTTP 429). To stop both, run the command twice.

    Example: `manage.py pause ingest --reason "moving the CRM"`
    """
    import settings
    from models.engine import engine
    from tasks.operations.pauses import pause_queue

    paused = pause_queue(engine(), settings.current(), queue, actor=operator(), reason=reason, intake=intake)
    if as_json:
        print_json(camel(paused))
    else:
        console.print(f"{queue}: {_describe(paused)}", markup=False)


def resume(
    queue: Name,
    intake: Annotated[bool, typer.Option("--intake", help="Only take new tasks again.")] = False,
    as_json: Json = False,
) -> None:
    """End the pauses of a queue, and wake its due tasks.

    Example: `manage.py resume ingest`
    """
    import settings
    from models.engine import engine
    from tasks.operations.pauses import resume_queue, wake_resumed

    woken = 0
    with publish_wakeups():
        ended = resume_queue(engine(), settings.current(), queue, intake_only=intake, actor=operator())

        def tasks_so_far() -> Iterator[int]:
            for total in wake_resumed(engine(), ended):
                yield total.tasks

        woken = with_progress(tasks_so_far(), total=0, what="woken")
    if as_json:
        print_json({"queue": queue, "ended": [camel(each) for each in ended], "woken": woken})
    elif not ended:
        console.print(f"{queue} was not paused.", markup=False)
    else:
        console.print(f"{queue} is resumed; woken: {plural(woken, 'task')}.", markup=False)


def scale(
    processes: Annotated[int | None, typer.Argument(metavar="[N]", help="Processes of each worker, 1 to 128.")] = None,
    queue: Annotated[str, typer.Option(help="Change the workers that consume this queue.")] = "ingest",
    reset: Annotated[
        bool, typer.Option("--reset", help="Forget the number: workers return to the one that they were started with.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Set the number of processes of each prefork worker that consumes the queue, now and after restarts.

    A process that runs a task is ended when it is idle. Workers with -P threads or -P solo do not change.

    Example: `manage.py scale 4 --queue ingest`
    """
    import settings
    from models.engine import engine
    from models.errors import Misuse
    from tasks.operations.scale import read_sizes, set_scale

    if (processes is None) != reset:
        raise Misuse("Give either a number of processes or --reset.")
    with engine().connect() as connection:
        before = {each.worker: each.processes for each in read_sizes(connection, queue)}
    set_scale(engine(), settings.current(), queue, processes, actor=operator())
    give_up_at = time.monotonic() + SCALE_PATIENCE_SECONDS
    while True:
        with engine().connect() as connection:
            after = read_sizes(connection, queue)
        done = all(_is_done(each, processes) for each in after)
        if done or time.monotonic() >= give_up_at:
            break
        time.sleep(LOOK_SECONDS)
    if as_json:
        workers = [{**camel(each), "before": before.get(each.worker)} for each in after]
        print_json({"queue": queue, "processes": processes, "done": done, "workers": workers})
    else:
        _print_sizes(after, before, processes)


def _is_done(size: WorkerSize, wanted: int | None) -> bool:
    """Return whether a worker has the wanted size. Without one, its own size is not known here: do not wait."""
    return size.processes is None or wanted is None or size.processes == wanted


def _print_sizes(after: list[WorkerSize], before: dict[str, int | None], wanted: int | None) -> None:
    if not after:
        console.print("No worker consumes this queue now; those that start will have this size.")
        return
    rows = []
    for each in after:
        if each.processes is None:
            note = "its pool has no processes to change"
        elif wanted is None:
            note = "returns to the number that it was started with"
        else:
            note = "done" if each.processes == wanted else "changes when its processes are idle"
        rows.append((each.worker, _number(before.get(each.worker)), _number(each.processes), note))
    print_table(("worker", "before", "now", ""), rows)


def _number(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _processes(queue: ListedQueue) -> str:
    now = " + ".join(_number(each.processes) for each in queue.workers) or "no worker"
    return now if queue.target_processes is None else f"{now} (target: {queue.target_processes})"


def _state(queue: ListedQueue) -> list[str]:
    found = [_describe(each) for each in (queue.pause, queue.intake_pause) if each]
    if queue.alert_since:
        also = "" if queue.takes_tasks else ", new tasks are refused"
        found.append(f"backlog alert since {format_time_utc(queue.alert_since)}{also}")
    return found


def _describe(paused: QueuePause) -> str:
    what = "new tasks are refused" if paused.intake else "paused"
    why = f": {paused.reason}" if paused.reason else ""
    return f"{what} since {format_time_utc(paused.since)} by {paused.actor}{why}"
