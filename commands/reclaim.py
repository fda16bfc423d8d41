"""reclaim, rebuild-broker: restore from the ledger what a lost worker or broker held."""

# ruff: noqa: PLC0415 - SQLAlchemy and Celery load slowly

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from commands.complaint import complain
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.options import Json
from commands.output import camel, console, plural, print_json, print_table, with_progress
from commands.wakeups import publish_wakeups

WORDS: Final = {
    "leases": "workers lost",
    "charged": "tasks failed",
    "isolated": "tasks to run alone",
    "released": "tasks released",
    "sinkCommits": "effects committed in sinks",
    "sinkAborts": "effects aborted in sinks",
    "backlogAlerts": "backlog alerts raised or cleared",
    "expired": "expired tasks discarded",
    "wokenAgain": "tasks woken again",
}


def register(app: typer.Typer) -> None:
    app.command()(reclaim)
    app.command("rebuild-broker")(rebuild_broker)


def reclaim(
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Recover the tasks of lost workers and tasks whose message was lost, until Ctrl-C.

    Beat does the same regularly; this command is for installations without beat.

    Example: `manage.py reclaim --once --json`
    """
    import settings
    from tasks import ticks

    with until_interrupted() as stopped, publish_wakeups():
        while not stopped.is_set():
            _print_reclaimed(ticks.run("reclaim"), as_json=as_json)
            if once:
                break
            stopped.wait(settings.current().ingest_reclaim_interval_ms / 1000)


def _print_reclaimed(found: dict[str, Any] | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"ran": found is not None, **(found or {})})
    elif found is None:
        console.print("Another process is already reclaiming.")
    else:
        console.print(", ".join(f"{WORDS.get(name, name)}: {number}" for name, number in found.items()))


def rebuild_broker(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be sent.")] = False,
    as_json: Json = False,
) -> None:
    """Fill an empty broker: send a message for every due task, and restore the dead-letter queue.

    Use it after the broker lost its content, or for a new broker. It is safe at any time, also while workers run: a
    task that gets two messages runs once.

    Example: `manage.py rebuild-broker --dry-run`
    """
    import settings
    from models.engine import engine
    from tasks import broker
    from tasks.core.wakeups import Woken
    from tasks.operations import dead_letter_queue, dead_tasks, rebuild_broker

    current = settings.current()
    with engine().connect() as connection:
        due = rebuild_broker.count_due(connection)
        dead = dead_tasks.count(connection, dead_tasks.Choice()).total
    total = sum(kind.count for kind in due)
    if dry_run:
        if as_json:
            print_json({"dryRun": True, "due": [camel(kind) for kind in due], "tasks": total, "dead": dead})
        else:
            print_table(("queue", "type", "due"), [(kind.queue, kind.type, f"{kind.count:,}") for kind in due])
            console.print(f"to wake: {plural(total, 'task')}; dead letters: {dead:,}")
        return
    broker.depths([current.ingest_queues[0]])  # fail before anything is changed if the broker is unreachable
    woken = Woken()
    with until_interrupted() as stopped, publish_wakeups():

        def tasks_so_far() -> Iterator[int]:
            nonlocal woken
            for woken in rebuild_broker.wake_all_due(engine()):
                yield woken.tasks
                if stopped.is_set():
                    return

        with_progress(tasks_so_far(), total=total, what="woken")
        if not stopped.is_set():
            letters = dead_letter_queue.sync(engine(), current, force=True)
    if stopped.is_set():
        complain(f"Interrupted after {woken.tasks:,} of {plural(total, 'task')}. It is safe to run the command again.")
        raise typer.Exit(INTERRUPTED)
    if as_json:
        print_json({"tasks": woken.tasks, "wakeups": woken.wakeups, "letters": letters})
    else:
        sent = f"{plural(woken.tasks, 'task')} with {plural(woken.wakeups, 'message')}"
        console.print(f"woke {sent}; dead letters written: {letters:,}")
