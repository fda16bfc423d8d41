"""Compare Celeriac with plain Celery, other queues and its own bare SQL: the same work, in one run, as ratios.

Each system gets fresh, durable servers, two worker processes, and tasks that insert one row each. The clock starts when
both processes wait at the gate (`peers/effect.py`) and ends when the last row is committed. Then the table must contain
every task exactly once; with Celeriac, every task must also be SUCCEEDED and no lease may be left.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from sqlalchemy import Engine

from bench.peers.effect import SINK
from bench.peers.our_handlers import MANY
from bench.peers.programs import PATIENCE_SECONDS, MeasurementFailed, Place, answer, answering, read_answer, working
from bench.scratch import scratch_servers
from child_process import ChildProcess
from models.engine import make_engine
from models.sql import sql

# Fast systems get this many times more tasks, so that the measured time is long enough.
FAST: Final = 3
FASTEST: Final = 10
HANDLERS: Final = {"INGEST_HANDLERS": "bench.peers.our_handlers"}
EFFECTS: Final = sql("SELECT count(*) FROM bench_sink")
EXACTLY: Final = sql("SELECT count(*), count(DISTINCT n), min(n), max(n) FROM bench_sink")
UNDONE: Final = sql(
    "SELECT (SELECT count(*) FROM ledger.ingest_task WHERE status <> 'SUCCEEDED'), count(*) FROM ledger.task_lease"
)
STARTS: Final = sql("SELECT CAST(value AS float8) FROM bench_sink ORDER BY n")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class System:
    """A system and how to run it. `programs` of them make two processes; its module explains `width`."""

    name: str
    module: str
    width: int
    programs: int = 1
    type: str | None = None  # Celeriac only: the type of its tasks
    foreign: bool = False
    keys: int = 0  # Celeriac only: number of partition keys
    times: int = 1  # factor for the number of tasks


PLAIN: Final = (
    System("plain Celery, prefetch 1", "plain_celery", 1),
    System("plain Celery, prefetch 16", "plain_celery", 16),
)
PEERS: Final = (
    System("Dramatiq, 1 thread", "dramatiq_", 1, foreign=True),
    System("Dramatiq, 8 threads", "dramatiq_", 8, foreign=True),
    System("Procrastinate, concurrency 1", "procrastinate_", 1, programs=2, foreign=True),
    System("Procrastinate, concurrency 10", "procrastinate_", 10, programs=2, foreign=True),
    System("PgQueuer, batch 10", "pgqueuer_", 10, programs=2, foreign=True),
    System("PgQueuer, batch 100", "pgqueuer_", 100, programs=2, foreign=True),
)
LIMIT: Final = System("raw SQL, batch 1000", "raw_sql", MANY, programs=2, type="bench.many", times=FASTEST)
OURS_TASK: Final = (
    System("ours, per-task handler, batch 100", "ours", 1, type="bench.task", times=FAST),
    System("ours, per-task handler, batch 1000", "ours", 1, type="bench.small", times=FAST),
)
OURS_KEYED: Final = System(
    "ours, per-task handler, 1,000 partition keys", "ours", 1, type="bench.task", keys=1000, times=FAST
)
OURS_MANY: Final = (
    System("ours, many=True, batch 1000, prefetch 1", "ours", 1, type="bench.many", times=FASTEST),
    System("ours, many=True, batch 1000, prefetch 4", "ours", 4, type="bench.many", times=FASTEST),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tasks per second of a system."""

    system: str
    per_second: float


@dataclass(frozen=True, slots=True)
class Latency:
    """The time from before the call to submit until the first line of the handler, in milliseconds."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of the largest worker child, in MiB, after the first and the last tasks."""

    first_tasks: int
    first_mib: float
    last_tasks: int
    last_mib: float


@dataclass(frozen=True, slots=True)
class Found:
    """All results of one run."""

    plain: list[Rate]
    peers: list[Rate]
    limit: Rate
    task: list[Rate]
    many: list[Rate]
    keyed: Rate
    plain_one_by_one: float
    one_by_one: float
    one_by_one_in_sessions: float
    plain_latency: Latency
    latency: Latency
    bare_insert: float
    submit_many: float
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its target: a minimum, or with `at_most` a maximum."""

    what: str
    reached: float
    wanted: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted


def goals(found: Found) -> list[Goal]:
    """Return the design goals and the figures reached. For every system its best setting counts."""
    plain, task, many = (fastest(rates) for rates in (found.plain, found.task, found.many))
    reached = [Goal("per-task handler : plain Celery", task / plain, 8)]
    if found.peers:
        reached.append(Goal("per-task handler : best peer", task / fastest(found.peers), 2.5))
    reached += [
        Goal("many=True : plain Celery", many / plain, 12),
        Goal("many=True : raw SQL", many / found.limit.per_second, 0.8),
        Goal("1,000 partition keys : no key", found.keyed.per_second / found.task[0].per_second, 0.5),
        Goal("one by one : plain Celery", found.one_by_one / found.plain_one_by_one, 2),
        Goal("submit → start, p50 ms", found.latency.p50_ms, 15, at_most=True),
        Goal("submit → start, p99 ms", found.latency.p99_ms, 60, at_most=True),
        Goal("submit_many : bare INSERTs", found.submit_many / found.bare_insert, 0.6),
    ]
    if found.memory:
        growth = found.memory.last_mib / found.memory.first_mib
        reached.append(Goal("memory of a child, last : first", growth, 1.1, at_most=True))
    return reached


def fastest(rates: Sequence[Rate]) -> float:
    return max(rate.per_second for rate in rates)


def measure(
    *, count: int, singles: int, rounds: int, with_peers: bool, memory_tasks: tuple[int, int] | None, say: Say
) -> Found:
    """Measure everything `rounds` times. For each figure, the best round counts, for every system alike."""
    # Systems that are compared run directly after each other: the speed of a shared machine changes within minutes.
    systems = (*(PEERS if with_peers else ()), *PLAIN, *OURS_TASK, OURS_KEYED, *OURS_MANY, LIMIT)
    rates: dict[str, list[Rate]] = {system.name: [] for system in systems}
    ones: dict[str, list[float]] = {PLAIN[0].name: [], OURS_TASK[0].name: []}
    in_sessions = []
    waits: dict[str, list[Latency]] = {name: [] for name in ones}
    bare, ours = [], []
    for _ in range(rounds):
        for system in systems:
            rates[system.name].append(throughput(system, count * system.times, say))
        for system in (PLAIN[0], OURS_TASK[0]):
            ones[system.name].append(one_by_one(system, count, say))
            waits[system.name].append(latency(system, singles, say))
        in_sessions.append(one_by_one(OURS_TASK[0], count, say, in_sessions=True))
        bare.append(submitting(LIMIT, ("insert", FAST * count), say))
        ours.append(submitting(OURS_TASK[0], ("submit", FAST * count, "bench.task"), say))
    best = {name: max(found, key=lambda rate: rate.per_second) for name, found in rates.items()}
    shortest = {name: min(found, key=lambda wait: wait.p99_ms) for name, found in waits.items()}
    return Found(
        plain=[best[system.name] for system in PLAIN],
        peers=[best[system.name] for system in PEERS if system.name in best],
        limit=best[LIMIT.name],
        task=[best[system.name] for system in OURS_TASK],
        many=[best[system.name] for system in OURS_MANY],
        keyed=best[OURS_KEYED.name],
        plain_one_by_one=max(ones[PLAIN[0].name]),
        one_by_one=max(ones[OURS_TASK[0].name]),
        one_by_one_in_sessions=max(in_sessions),
        plain_latency=shortest[PLAIN[0].name],
        latency=shortest[OURS_TASK[0].name],
        bare_insert=max(bare),
        submit_many=max(ours),
        memory=memory(*memory_tasks, say) if memory_tasks else None,
    )


def throughput(system: System, count: int, say: Say) -> Rate:
    """Measure how fast tasks that were submitted before run."""
    say(f"{system.name}: {count:,} tasks …")
    with _servers(system) as (engine, place):
        if system.module == "ours":
            answer(place, "ours", "gates")
        _submit(place, system, count)
        with working(place, system.module, system.width, system.programs) as running:
            place.await_all(running)
            began_at = time.monotonic()
            place.open_gate()
            seconds = await_effects(engine, place, running, count, began_at) - began_at
        _verify(engine, system, count)
    return Rate(system.name, count / seconds)


def one_by_one(system: System, count: int, say: Say, *, in_sessions: bool = False) -> float:
    """Return tasks per second, from the first call of four client threads to the last effect."""
    say(f"{system.name}, one by one{' in sessions' if in_sessions else ''}: {count:,} tasks …")
    call = ("one_by_one", count, int(in_sessions))
    with _warm(system) as (engine, place, running), answering(place, system.module, *call) as client:
        ended_at = await_effects(engine, place, running, count + 1, time.monotonic())
        began_at: float = read_answer(client)["began_at"]
    return count / (ended_at - began_at)


def latency(system: System, count: int, say: Say) -> Latency:
    """Measure single tasks at light load."""
    say(f"{system.name}, latency: {count:,} single tasks …")
    with _warm(system) as (engine, place, running):
        submitted: list[float] = answer(place, system.module, "singles", count)
        await_effects(engine, place, running, count, time.monotonic())
        with engine.connect() as connection:
            started: Sequence[float] = connection.execute(STARTS).scalars().all()
    return percentiles([(start - submit) * 1000 for start, submit in zip(started, submitted, strict=True)])


def percentiles(waits: Sequence[float]) -> Latency:
    """Compute percentiles without the first tenth, which opens connections."""
    times = sorted(waits[len(waits) // 10 :])
    return Latency(times[len(times) // 2], times[int(len(times) * 0.99)])


def submitting(system: System, command: tuple[str | int, ...], say: Say) -> float:
    """Return how many tasks per second are submitted."""
    say(f"{system.name}: {command[0]} …")
    with _servers(system) as (_engine, place):
        seconds: float = answer(place, system.module, *command)["seconds"]
    return int(command[1]) / seconds


def memory(first: int, last: int, say: Say) -> Memory:
    """Measure a child after `first` tasks and again after `last` tasks."""
    say(f"memory: {last:,} tasks …")
    with _warm(OURS_TASK[0]) as (engine, place, running):
        grown = []
        for start, end in ((0, first), (first, last)):
            answer(place, "ours", "submit", end - start, "bench.task", start)
            await_effects(engine, place, running, end, time.monotonic())
            children = psutil.Process(running[0].pid).children(recursive=True)
            grown.append(max(child.memory_info().rss for child in children) / 2**20)
    return Memory(first, grown[0], last, grown[1])


@contextmanager
def _servers(system: System) -> Iterator[tuple[Engine, Place]]:
    """Start fresh servers with an empty table of effects, and create a folder for the programs."""
    with scratch_servers() as settings, tempfile.TemporaryDirectory(prefix="celeriac-bench-") as folder:
        engine = make_engine(settings.database_url)
        with engine.begin() as connection:
            connection.execute(sql(SINK))
        try:
            yield engine, Place(Path(folder), foreign=system.foreign, variables={} if system.foreign else HANDLERS)
        finally:
            engine.dispose()


@contextmanager
def _warm(system: System) -> Iterator[tuple[Engine, Place, list[ChildProcess]]]:
    """Start servers and workers, let each process run one task, and empty the table of effects."""
    with _servers(system) as (engine, place):
        if system.module == "ours":
            answer(place, "ours", "gates")
        else:
            answer(place, system.module, "submit", 2)
        with working(place, system.module, system.width, system.programs) as running:
            place.await_all(running)
            place.open_gate()
            if system.module != "ours":
                await_effects(engine, place, running, 2, time.monotonic())
            with engine.begin() as connection:
                connection.execute(sql("TRUNCATE bench_sink"))
            yield engine, place, running


def _submit(place: Place, system: System, count: int) -> None:
    if system.type:
        answer(place, "ours", "submit", count, system.type, 0, system.keys)
    else:
        answer(place, system.module, "submit", count)


def await_effects(engine: Engine, place: Place, running: Sequence[ChildProcess], count: int, began_at: float) -> float:
    """Return when the last row was committed. Count more often near the end, since counting slows the system down."""
    found, moved_at = 0, time.monotonic()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while True:
            before, found = found, connection.execute(EFFECTS).scalar_one()
            now = time.monotonic()
            if found >= count:
                return now
            place.require_alive(running)
            if found > before:
                moved_at = now
            elif now > moved_at + PATIENCE_SECONDS:
                raise MeasurementFailed(f"Only {found:,} of {count:,} tasks ran. {place.last_output()}")
            time.sleep(pause(found, count, now - began_at))


def pause(found: int, count: int, seconds: float) -> float:
    """Return half of the estimated remaining time, within bounds."""
    left = (count - found) * seconds / found if found else 0.1
    return min(0.5, max(0.003, left / 2))


def _verify(engine: Engine, system: System, count: int) -> None:
    """Raise MeasurementFailed unless every task had exactly one effect."""
    with engine.connect() as connection:
        found = tuple(connection.execute(EXACTLY).one())
        if found != (count, count, 0, count - 1):
            raise MeasurementFailed(f"{system.name}: {found[0]:,} effects of {found[1]:,} tasks instead of {count:,}.")
        if system.type:
            undone, leases = connection.execute(UNDONE).one()
            if undone or leases:
                raise MeasurementFailed(f"{system.name}: {undone:,} tasks are not SUCCEEDED, {leases:,} leases left.")
