"""Measure one system: submit tasks, run them, and check that each had exactly one effect.

Each system gets fresh, durable servers, two worker processes, and tasks that insert one row each. The clock starts when
both processes wait at the gate (`peers/effect.py`) and ends when the last row is committed. Then the table must contain
every task exactly once; with Celeriac, every task must also be SUCCEEDED and no lease may be left.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from sqlalchemy import Engine

from bench.peers.effect import SINK, SLOW_URL
from bench.peers.programs import PATIENCE_SECONDS, MeasurementFailed, Place, answer, answering, read_answer, working
from bench.scratch import scratch_servers
from bench.slow_server import PAUSE_SECONDS, slow_server
from child_process import ChildProcess
from models.engine import make_engine
from models.sql import sql

NOTHING: Final[Mapping[str, str]] = {}
HANDLERS: Final = {"INGEST_HANDLERS": "bench.peers.our_handlers"}
EFFECTS: Final = sql("SELECT count(*) FROM bench_sink")
EXACTLY: Final = sql("SELECT count(*), count(DISTINCT n), min(n), max(n) FROM bench_sink")
DONE: Final = sql("SELECT count(*) FROM ledger.ingest_task WHERE type = 'bench.wait' AND status = 'SUCCEEDED'")
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
    command: str = "work"
    type: str | None = None  # Celeriac only: the type of its tasks
    foreign: bool = False
    keys: int = 0  # Celeriac only: number of partition keys
    times: int = 1  # factor for the number of tasks


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


def throughput(system: System, count: int, say: Say) -> Rate:
    """Measure how fast tasks that were submitted before run."""
    say(f"{system.name}: {count:,} tasks …")
    with servers(system) as (engine, place):
        if system.module == "ours":
            answer(place, "ours", "gates")
        _submit(place, system, count)
        with working_system(place, system) as running:
            place.await_all(running)
            began_at = time.monotonic()
            place.open_gate()
            seconds = await_effects(engine, place, running, count, began_at) - began_at
        _verify(engine, system, count)
    rate = Rate(system.name, count / seconds)
    say(f"{system.name}: {rate.per_second:,.0f} tasks/s")
    return rate


def waiting_rate(system: System, count: int, say: Say) -> Rate:
    """Measure tasks that wait for a slow HTTP server, until all are done: ours SUCCEEDED, others answered."""
    say(f"{system.name}: {count:,} tasks that wait {PAUSE_SECONDS:g} s …")
    with slow_server() as server, servers(system, {SLOW_URL: server.url}) as (engine, place):
        if system.type:
            answer(place, "ours", "gates")
            _submit(place, system, count)
        else:
            answer(place, system.module, "submit_waiting", count)
        with working_system(place, system) as running:
            place.await_all(running)
            began_at = time.monotonic()
            place.open_gate()
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:

                def done() -> int:
                    return int(connection.execute(DONE).scalar_one()) if system.type else server.answered

                seconds = await_count(done, place, running, count, began_at) - began_at
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
    with servers(system) as (_engine, place):
        seconds: float = answer(place, system.module, *command)["seconds"]
    return int(command[1]) / seconds


def memory(system: System, first: int, last: int, say: Say) -> Memory:
    """Measure a child after `first` tasks and again after `last` tasks."""
    say(f"memory: {last:,} tasks …")
    with _warm(system) as (engine, place, running):
        grown = []
        for start, end in ((0, first), (first, last)):
            answer(place, "ours", "submit", end - start, system.type, start)
            await_effects(engine, place, running, end, time.monotonic())
            children = psutil.Process(running[0].pid).children(recursive=True)
            grown.append(max(child.memory_info().rss for child in children) / 2**20)
    return Memory(first, grown[0], last, grown[1])


def working_system(place: Place, system: System) -> AbstractContextManager[list[ChildProcess]]:
    return working(place, system.module, system.width, system.programs, system.command)


@contextmanager
def servers(system: System, variables: Mapping[str, str] = NOTHING) -> Iterator[tuple[Engine, Place]]:
    """Start fresh servers with an empty table of effects, and create a folder for the programs."""
    with scratch_servers() as settings, tempfile.TemporaryDirectory(prefix="celeriac-bench-") as folder:
        engine = make_engine(settings.database_url)
        with engine.begin() as connection:
            connection.execute(sql(SINK))
        try:
            ours = {} if system.foreign else HANDLERS
            yield engine, Place(Path(folder), foreign=system.foreign, variables={**ours, **variables})
        finally:
            engine.dispose()


@contextmanager
def _warm(system: System) -> Iterator[tuple[Engine, Place, list[ChildProcess]]]:
    """Start servers and workers, let each process run one task, and empty the table of effects."""
    with servers(system) as (engine, place):
        if system.module == "ours":
            answer(place, "ours", "gates")
        else:
            answer(place, system.module, "submit", 2)
        with working_system(place, system) as running:
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
    """Return when the last row was committed."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return await_count(lambda: connection.execute(EFFECTS).scalar_one(), place, running, count, began_at)


def await_count(
    done: Callable[[], int], place: Place, running: Sequence[ChildProcess], count: int, began_at: float
) -> float:
    """Return when so many are done. Count more often near the end, since counting slows the system down."""
    found, moved_at = 0, time.monotonic()
    while True:
        before, found = found, done()
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
