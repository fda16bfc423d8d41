"""reclaim, rebuild-broker: what was lost with a worker or with the broker comes back out of the ledger."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import settings
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import camel, complain, console, print_json, print_table, with_progress
from commands.wakeups import publish_wakeups

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command()(reclaim)
    app.command("rebuild-broker")(rebuild_broker)


def reclaim(
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    as_json: Json = False,
) -> None:
    """Take over the tasks of lost workers and wake-up again for lost wake-ups, until Ctrl-C. Beat does the same.

    Example: `manage.py reclaim --once --json`
    """
    from tasks import ticks  # noqa: PLC0415 - loads SQLAlchemy and Celery

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
        console.print("Reclaim runs elsewhere just now.")
    else:
        words = {
            "leases": "lost leases",
            "charged": "tasks charged",
            "isolated": "isolated",
            "wokenAgain": "woken again",
        }
        console.print(", ".join(f"{words.get(name, name)} {number}" for name, number in found.items()))


def rebuild_broker(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much it would be.")] = False,
    as_json: Json = False,
) -> None:
    """After a flush, or with a new broker: wake-up for everything that is due and restore the dead letters.

    Safe at any time, with workers running too: a task that is woken twice is run once.

    Example: `manage.py rebuild-broker --dry-run`
    """
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy and Celery
    from tasks import broker  # noqa: PLC0415
    from tasks.operations import dead_letter_queue, dead_tasks, rebuild_broker  # noqa: PLC0415

    current = settings.current()
    with engine().connect() as connection:
        due = rebuild_broker.due(connection)
        dead = dead_tasks.count(connection, dead_tasks.Choice()).total
    total = sum(kind.count for kind in due)
    if dry_run:
        if as_json:
            print_json({"dryRun": True, "due": [camel(kind) for kind in due], "tasks": total, "dead": dead})
        else:
            print_table(("queue", "type", "due"), [(kind.queue, kind.type, f"{kind.count:,}") for kind in due])
            console.print(f"to be woken: {total:,} tasks; dead letters: {dead:,}")
        return
    broker.depths([current.ingest_queues[0]])  # one that is away is said before anything is done
    woken = rebuild_broker.Woken()
    with until_interrupted() as stopped, publish_wakeups():
        pages = rebuild_broker.wake_all_due(engine())

        def tasks_so_far() -> Any:
            nonlocal woken
            for woken in pages:
                yield woken.tasks
                if stopped.is_set():
                    return

        with_progress(tasks_so_far(), total=total, what="woken")
        if not stopped.is_set():
            letters = dead_letter_queue.sync(engine(), current, depths=broker.depths, purge=broker.purge, force=True)
    if stopped.is_set():
        complain(f"Interrupted after {woken.tasks:,} of {total:,} tasks. It is safe to run it again.")
        raise typer.Exit(INTERRUPTED)
    if as_json:
        print_json({"tasks": woken.tasks, "wakeups": woken.wakeups, "letters": letters})
    else:
        console.print(
            f"woken for {woken.tasks:,} tasks in {woken.wakeups:,} wake-ups; dead letters written: {letters:,}"
        )
