"""bench: compare the speed with other systems and with bare SQL, in one run."""

# ruff: noqa: PLC0415 - the benchmarks load every package

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from commands.bench_goals import print_goals
from commands.bench_progress import running_bench
from commands.bench_receipts import receipts
from commands.options import Json
from commands.output import console, print_json, print_table

if TYPE_CHECKING:
    from bench.ingest import Found
    from bench.outbox import Rates


HELP: Final = """Compare the speed with other systems and with bare SQL, on temporary servers.

Example: `manage.py bench ingest --count 5000 --without-peers`
"""


def register(app: typer.Typer) -> None:
    bench = typer.Typer(no_args_is_help=True, help=HELP)
    bench.callback()(lambda: None)
    bench.command()(outbox)
    bench.command()(ingest)
    bench.command("async")(long_tasks)
    bench.command()(recovery)
    bench.command()(sinks)
    bench.command()(operations)
    bench.command("console")(pages)
    bench.command()(receipts)
    app.add_typer(bench, name="bench")


def outbox(
    *,
    count: Annotated[int, typer.Option(min=1000, help="Number of events to relay.")] = 20_000,
    singles: Annotated[int, typer.Option(min=100, help="Number of single events for the latency.")] = 1000,
    history: Annotated[
        int, typer.Option(min=50_000, help="Number of SENT events, and of scheduled events, in the table.")
    ] = 1_000_000,
    held_seconds: Annotated[int, typer.Option(min=1, help="Seconds to hold a transaction open.")] = 60,
    as_json: Json = False,
) -> None:
    """Compare the relay with a textbook relay and with bare SQL, and one event with `.delay()`.

    Also measure how a long history and a transaction that stays open slow it down.

    Example: `manage.py bench outbox --history 100000 --held-seconds 10`
    """
    from bench import outbox as fresh
    from bench import outbox_history as old
    from bench.scratch import scratch_servers

    with running_bench() as show, scratch_servers(stream=fresh.STREAM) as settings:
        show("relays to the Celery queue …")
        celery = fresh.to_celery(settings, count=count)
        show("relays to a Redis Stream …")
        stream = fresh.to_redis_stream(settings, count=count)
        show("single events …")
        add, delay = fresh.latencies(settings, count=singles)
        show("claims with a long history …")
        claim = old.claim_cost(settings, history=history)
        show(f"holding a transaction open for {held_seconds} s …")
        held = old.held_transaction(settings, seconds=held_seconds)
    if as_json:
        print_json({"celery": celery, "stream": stream, "add": add, "delay": delay, "claim": claim, "held": held})
        return
    _print_rates("to the Celery queue", celery)
    _print_rates("to a Redis Stream", stream)
    print_table(
        ("one event, until the message can be popped", "p50 ms", "p99 ms"),
        [
            ("plain .delay()", f"{delay.p50_ms:.1f}", f"{delay.p99_ms:.1f}"),
            ("outbox.add, from its COMMIT", f"{add.p50_ms:.1f}", f"{add.p99_ms:.1f}"),
        ],
    )
    console.print()
    print_table(
        ("with age", "before", "after", "ratio"),
        [
            (
                f"claim of a batch; {history:,} SENT, {history:,} scheduled",
                f"{claim.without_history_ms:.1f} ms",
                f"{claim.with_history_ms:.1f} ms",
                f"{claim.ratio:.2f}×",
            ),
            (
                f"publishing {held.passed:,} events while a transaction stays open",
                f"{held.first_rate:,.0f}/s",
                f"{held.last_rate:,.0f}/s",
                f"{held.ratio:.0%}",
            ),
            ("first claim while it stays open", f"{held.first_claim_ms:.1f} ms", f"{held.last_claim_ms:.1f} ms", ""),
        ],
    )


def ingest(
    *,
    count: Annotated[
        int, typer.Option(min=1000, help="Number of tasks for each system; three times as many for ours.")
    ] = 20_000,
    singles: Annotated[int, typer.Option(min=50, help="Number of single tasks for the latency.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the best result of each system counts.")] = 1,
    without_peers: Annotated[
        bool, typer.Option("--without-peers", help="Compare with plain Celery and raw SQL only.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure the memory of a worker process over many tasks.")
    ] = False,
    memory_tasks: Annotated[
        int, typer.Option(min=1000, help="With --memory: number of tasks; the first sample is after a tenth of them.")
    ] = 100_000,
    as_json: Json = False,
) -> None:
    """Compare with plain Celery, Dramatiq, Procrastinate, PgQueuer and bare SQL, doing the same work.

    Each task inserts one row. Each system has two worker processes and its own servers. `make bench-peers` installs
    the other systems into a separate virtual environment.

    Example: `manage.py bench ingest --count 5000 --without-peers`
    """
    from bench import ingest as measured
    from bench.peers.programs import require_peers

    if not without_peers:
        require_peers()
    with running_bench() as show:
        found = measured.measure(
            count=count,
            singles=singles,
            rounds=rounds,
            with_peers=not without_peers,
            memory_tasks=(memory_tasks // 10, memory_tasks) if memory else None,
            say=show,
        )
    goals = measured.goals(found)
    if as_json:
        print_json({"found": found, "goals": goals})
        return
    _print_systems(found)
    print_goals(goals)


def long_tasks(
    *,
    count: Annotated[int, typer.Option(min=1000, help="Number of tasks in each run.")] = 20_000,
    concurrency: Annotated[int, typer.Option(min=50, help="Tasks that run at once in each process.")] = 100,
    as_json: Json = False,
) -> None:
    """Measure whether long tasks of an async handler hold up the short ones beside them.

    Two processes run tasks of 50 ms: alone, beside a few that take 30 seconds, and with 1 % that take 30 seconds.

    Example: `manage.py bench async --count 5000`
    """
    from bench import long_tasks as measured

    with running_bench() as show:
        found = measured.measure(count=count, concurrency=concurrency, say=show)
    goals = measured.goals(found)
    if as_json:
        print_json({"found": found, "goals": goals})
        return
    print_table(
        (f"{count:,} tasks of 50 ms, some of 30 s", "long tasks", "short tasks/s", "places in use"),
        [(each.what, str(each.long_tasks), f"{each.short_per_second:,.0f}", f"{each.in_use:.0%}") for each in found],
    )
    console.print()
    print_goals(goals)


def recovery(
    *,
    count: Annotated[int, typer.Option(min=1000, help="Number of tasks in each backlog.")] = 20_000,
    outage_seconds: Annotated[float, typer.Option(min=1, help="Seconds without PostgreSQL.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="How many child processes, and how many workers, are killed.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure how fast work goes on after an outage of PostgreSQL or the broker, and after the loss of workers.

    Real workers drain a backlog on temporary servers. Its rate is compared with that of the same workers without an
    outage.

    Example: `manage.py bench recovery --count 5000 --rounds 3`
    """
    from bench import recovery as measured

    with running_bench() as show:
        found = measured.measure(count=count, outage_seconds=outage_seconds, rounds=rounds, say=show)
    goals = measured.goals(found)
    if as_json:
        print_json({"found": found, "goals": goals})
        return
    print_table(
        (f"backlog of {count:,}", "undisturbed, tasks/s", "after it, tasks/s", "ratio", "CPU per task", "first claim"),
        [
            (
                drain.outage,
                f"{drain.undisturbed:,.0f}",
                f"{drain.per_second:,.0f}",
                f"{drain.ratio:.0%}",
                f"{drain.cpu:.2f}×",
                f"after {drain.first_claim_seconds:.1f} s",
            )
            for drain in found.drains
        ],
    )
    console.print()
    print_table(
        ("tasks run again after SIGKILL of", "tasks", "p50 s", "p99 s"),
        [
            (what, str(loss.tasks), f"{loss.p50_seconds:.2f}", f"{loss.p99_seconds:.2f}")
            for what, loss in (
                ("a child process", found.child),
                (f"a whole worker, with a lease of {found.lease_seconds:g} s", found.worker),
            )
        ],
    )
    console.print()
    print_goals(goals)


def sinks(
    *,
    count: Annotated[int, typer.Option(min=100, help="Number of tasks for each kind of sink.")] = 2000,
    as_json: Json = False,
) -> None:
    """Measure what each kind of sink costs, compared with one committed INSERT per task into the same database.

    Example: `manage.py bench sinks --count 500`
    """
    from bench import sinks as measured

    with running_bench() as show:
        found = measured.measure(count=count, say=show)
    goals = measured.goals(found)
    if as_json:
        print_json({"found": found, "goals": goals})
        return
    print_table(
        ("sink", "ms per task", "committed INSERTs"),
        [
            ("one INSERT and its COMMIT", f"{found.insert_ms:.2f}", "1.00"),
            *((cost.sink, f"{cost.ms:.2f}", f"{cost.inserts:.2f}") for cost in found.costs),
        ],
    )
    console.print()
    print_goals(goals)


def operations(
    *,
    tasks: Annotated[int, typer.Option(min=1000, help="Number of tasks in the ledger; a quarter is due.")] = 2_000_000,
    events: Annotated[int, typer.Option(min=0, help="Number of events that are not sent.")] = 200_000,
    tally: Annotated[int, typer.Option(min=0, help="Number of rows of the tally that are not folded.")] = 60_000,
    as_json: Json = False,
) -> None:
    """Measure what operators ask for, in a large ledger: a scrape of /metrics, `stats`, and a page of `tasks`.

    Example: `manage.py bench operations --tasks 100000`
    """
    from bench import operations as measured

    with running_bench() as show:
        found = measured.measure(tasks=tasks, events=events, tally=tally, say=show)
    if as_json:
        print_json(found)
        return
    rows = [(each.name, f"{each.database * 1000:.1f}", f"{each.whole * 1000:.1f}") for each in found]
    print_table(("call", "ms in PostgreSQL", "ms in all"), rows)


def pages(
    *,
    tasks: Annotated[int, typer.Option(min=1000, help="Number of tasks in the ledger; a quarter is due.")] = 2_000_000,
    events: Annotated[int, typer.Option(min=0, help="Number of events that are not sent.")] = 200_000,
    tally: Annotated[int, typer.Option(min=0, help="Number of rows of the tally that are not folded.")] = 60_000,
    as_json: Json = False,
) -> None:
    """Measure how long each page of the console takes in a large ledger.

    Example: `manage.py bench console --tasks 100000`
    """
    from bench import console as measured

    with running_bench() as show:
        found = measured.measure(tasks=tasks, events=events, tally=tally, say=show)
    if as_json:
        print_json(found)
        return
    print_table(
        ("page", "ms (median)", "longest", f"goal {measured.GOAL_MS:g} ms", "KB"),
        [
            (
                each.path,
                f"{each.seconds * 1000:.0f}",
                f"{each.longest * 1000:.0f}",
                "met" if each.seconds * 1000 <= measured.GOAL_MS else "missed",
                f"{each.size / 1024:.0f}",
            )
            for each in found
        ],
    )


def _print_systems(found: Found) -> None:
    from bench.ingest import fastest

    ours = [found.hundred, found.keyed, found.sqlalchemy, found.task, *found.many]
    systems = [*found.plain, *found.peers, *ours, found.limit_task, found.limit]
    task, many = found.task.per_second, fastest(found.many)
    print_table(
        ("submitted in advance", "tasks/s", "ours per task", "ours many=True"),
        [
            (
                rate.system,
                f"{rate.per_second:,.0f}",
                f"{task / rate.per_second:.2f}×",
                f"{many / rate.per_second:.2f}×",
            )
            for rate in systems
        ],
    )
    console.print()
    print_table(
        ("comparison", "plain Celery, or bare INSERTs", "ours"),
        [
            (
                "one by one, 4 threads, end to end, tasks/s",
                f"{found.plain_one_by_one:,.0f}",
                f"{found.one_by_one:,.0f}",
            ),
            ("  the same, in ORM sessions", "", f"{found.one_by_one_in_sessions:,.0f}"),
            ("one task, submit → start, p50 ms", f"{found.plain_latency.p50_ms:.1f}", f"{found.latency.p50_ms:.1f}"),
            ("one task, submit → start, p99 ms", f"{found.plain_latency.p99_ms:.1f}", f"{found.latency.p99_ms:.1f}"),
            ("submit_many, tasks/s", f"{found.bare_insert:,.0f}", f"{found.submit_many:,.0f}"),
        ],
    )
    console.print()
    print_table(
        ("tasks that wait 200 ms for an HTTP server, two processes", "tasks/s"),
        [(rate.system, f"{rate.per_second:,.0f}") for rate in found.waiting],
    )
    if found.memory:
        first, last = found.memory.first_mib, found.memory.last_mib
        tasks = f"{found.memory.first_tasks:,} and {found.memory.last_tasks:,} tasks"
        console.print(f"\nMemory of a worker process after {tasks}: {first:.1f} and {last:.1f} MiB")
    console.print()


def _print_rates(where: str, rates: Rates) -> None:
    print_table(
        (f"relay {where}", "events/s", "ratio"),
        [
            ("textbook, one row at a time", f"{rates.textbook:,.0f}", f"ours is {rates.times_textbook:.1f}×"),
            ("bare statements", f"{rates.bare:,.0f}", f"ours is {rates.share_of_bare:.0%}"),
            ("ours", f"{rates.ours:,.0f}", ""),
        ],
    )
    console.print()
