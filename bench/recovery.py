"""Measure how fast the system recovers: after outages of PostgreSQL and of the broker, and after the loss of workers.

Real programs run on temporary servers: one worker with two processes, one for the ticks, and beat. The drain rate
counts from the first claim of the backlog to its last success, by the ledger's history. Before each outage the same
worker drains a backlog without one, so that both rates belong to the same minute of a shared machine. Right before
that, PostgreSQL writes a checkpoint, as it does when it is stopped: the first change of each page after a checkpoint
costs more. While other programs compete for the machine, the CPU time of a task tells more than the rate.

PostgreSQL is stopped in the middle of the work. The messages of the broker are deleted (FLUSHALL) while both processes
are held at a gate, so that none of them has a message left.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import redis
from sqlalchemy import Engine

from bench.ingest import Goal
from bench.measure_system import EXACTLY, UNDONE, Say, await_effects
from bench.peers.effect import PROCESSES, SINK
from bench.peers.programs import PATIENCE_SECONDS, MeasurementFailed, Place, answer
from bench.recovery_handlers import LOST_BATCH
from bench.scratch import postgres_stopped, scratch_servers, write_checkpoint
from child_process import ChildProcess, OwnProcess, await_ready, end_all
from embedded.home import Home
from embedded.temporary_servers import environment
from models.engine import make_engine
from models.sql import sql
from settings import Settings

TYPE: Final = "bench.task"
WARM_UP: Final = 1000  # tasks
# A lost worker is noticed when its lease has expired. Its default of a minute would only make the bench longer.
SHORT: Final = {"INGEST_LEASE_SECONDS": "3", "INGEST_RECLAIM_INTERVAL_MS": "1000"}
CHILD_SECONDS: Final = 1.0
MARGIN_SECONDS: Final = 2.0
HANDLERS: Final = {"INGEST_HANDLERS": "bench.peers.our_handlers,bench.recovery_handlers"}
# drained: since a time, the first claim and the last success of the backlog, and the number of successes.
DRAINED: Final = sql("""
    SELECT min(moved.created_at) FILTER (WHERE to_status = 'RUNNING'),
           max(moved.created_at) FILTER (WHERE to_status = 'SUCCEEDED'), count(*) FILTER (WHERE to_status = 'SUCCEEDED')
    FROM ledger.ingest_task_transition moved JOIN ledger.ingest_task task ON task.id = moved.task_id
    WHERE task.type = :type AND moved.created_at >= :since
""")
CHARGED: Final = sql("SELECT count(*) FROM ledger.ingest_task WHERE attempt_count > 0")


@dataclass(frozen=True, slots=True)
class Drain:
    """How fast a backlog was drained after an outage, and how fast the same worker drained one before it."""

    outage: str
    undisturbed: float  # tasks per second
    per_second: float
    first_claim_seconds: float  # from the end of the outage
    cpu: float  # of workers and PostgreSQL for one task, as a multiple of the undisturbed; other programs do not count
    charged: int  # tasks that lost an attempt

    @property
    def ratio(self) -> float:
        return self.per_second / self.undisturbed


@dataclass(frozen=True, slots=True)
class Loss:
    """The seconds from a SIGKILL until a task of the killed process started again."""

    tasks: int
    p50_seconds: float
    p99_seconds: float
    wanted_seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """All results of one run. `claim_wanted_seconds` is the wake-up grace plus one interval of reclaim."""

    outage_seconds: float
    claim_wanted_seconds: float
    lease_seconds: float  # of the lost workers
    drains: list[Drain]
    child: Loss
    worker: Loss


def goals(found: Found) -> list[Goal]:
    """Return the design goals and the figures reached."""
    reached = [Goal(f"drain after {drain.outage} : undisturbed", drain.ratio, 0.8) for drain in found.drains]
    for drain in found.drains:
        what = f"first claim after {drain.outage}, s"
        reached.append(Goal(what, drain.first_claim_seconds, found.claim_wanted_seconds, at_most=True))
        reached.append(Goal(f"tasks charged for {drain.outage}", drain.charged, 0, at_most=True))
    for what, loss in (("killed child", found.child), ("lost worker", found.worker)):
        reached.append(Goal(f"tasks of a {what} run again, p99 s", loss.p99_seconds, loss.wanted_seconds, at_most=True))
    return reached


def measure(*, count: int, outage_seconds: float, rounds: int, say: Say) -> Found:
    """Measure every outage once, and the losses `rounds` times."""
    drains = []
    wanted = 0.0
    for outage, breaks in (
        ("PostgreSQL unreachable", _without_postgres),
        ("FLUSHALL", _without_messages),
        ("both", _without_both),
    ):
        with _system() as system:
            wanted = (system.settings.ingest_wakeup_grace_ms + system.settings.ingest_reclaim_interval_ms) / 1000
            say(f"{outage}: a backlog of {count:,} without an outage …")
            system.drain(WARM_UP, _open)
            before = system.drain(count, _open)
            say(f"{outage}: a backlog of {count:,} …")
            after = system.drain(count, partial(breaks, seconds=outage_seconds))
            cpu = after.cpu_seconds / before.cpu_seconds
            wait = after.first_claim_seconds
            drains.append(Drain(outage, before.per_second, after.per_second, wait, cpu, system.verify()))
    say("killed children …")
    with _system(SHORT) as system:
        child = percentiles([wait for _ in range(rounds) for wait in system.lose_child()], CHILD_SECONDS)
        say("lost workers …")
        lease, interval = system.settings.ingest_lease_seconds, system.settings.ingest_reclaim_interval_ms / 1000
        waits = [wait for _ in range(rounds) for wait in system.lose_worker()]
    worker = percentiles(waits, lease + 2 * interval + MARGIN_SECONDS)
    return Found(outage_seconds, wanted, lease, drains, child, worker)


def percentiles(waits: Sequence[float], wanted: float) -> Loss:
    times = sorted(waits)
    return Loss(len(times), times[len(times) // 2], times[int(len(times) * 0.99)], wanted)


@dataclass(frozen=True, slots=True)
class Drained:
    """The rate from the first claim on, when that came, and the CPU time of one task."""

    per_second: float
    first_claim_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """Tasks that wait while the worker's processes are held at a gate."""

    system: _System
    gate: str
    count: int

    def open_gate(self) -> None:
        (self.system.place.folder / f"{self.gate}-open").touch()

    def await_share(self, share: float) -> None:
        """Wait until so much of the backlog is done."""
        goal = self.system.submitted - self.count + int(self.count * share)
        await_effects(self.system.engine, self.system.place, self.system.running, goal, time.monotonic())


Break = Callable[[Backlog], datetime]


def _open(backlog: Backlog) -> datetime:
    write_checkpoint(backlog.system.settings)
    began_at = datetime.now(UTC)
    backlog.open_gate()
    return began_at


def _without_postgres(backlog: Backlog, seconds: float) -> datetime:
    """Stop PostgreSQL in the middle of the work; return when it answered again."""
    backlog.open_gate()
    backlog.await_share(0.1)
    with postgres_stopped(backlog.system.settings):
        time.sleep(seconds)
    return datetime.now(UTC)


def _without_messages(backlog: Backlog, seconds: float) -> datetime:
    del seconds  # the messages are gone at once
    flushed_at = datetime.now(UTC)
    _flush(backlog)
    backlog.open_gate()
    return flushed_at


def _without_both(backlog: Backlog, seconds: float) -> datetime:
    with postgres_stopped(backlog.system.settings):
        _flush(backlog)
        backlog.open_gate()
        time.sleep(seconds)
    return datetime.now(UTC)


def _flush(backlog: Backlog) -> None:
    with redis.Redis.from_url(backlog.system.settings.broker_url) as broker:
        broker.flushall()


class _System:
    """Running servers and programs: a worker that may be replaced, one for the ticks, and beat."""

    def __init__(self, settings: Settings, engine: Engine, place: Place) -> None:
        self.settings = settings
        self.engine = engine
        self.place = place
        self.submitted = 0
        self._names = iter(range(10_000))
        self._workers: list[ChildProcess] = []
        self._others: list[ChildProcess] = []

    @property
    def running(self) -> list[ChildProcess]:
        return [*self._workers, *self._others]

    def start(self) -> None:
        self._others += [self.place.start(name, "ours", (name,)) for name in ("system", "beat")]
        self._start_worker()
        await_ready(self.running, PATIENCE_SECONDS)

    def stop(self) -> None:
        end_all(self.running)

    def drain(self, count: int, breaks: Break) -> Drained:
        """Drain a backlog that an outage interrupts or delays."""
        gate = f"gate-{next(self._names)}"
        answer(self.place, "ours", "hold", gate)
        self._await_files(f"{gate}-*", PROCESSES)
        answer(self.place, "ours", "submit", count, TYPE, self.submitted)
        self.submitted += count
        since = breaks(Backlog(self, gate, count))
        cpu_before = self._cpu_seconds()
        await_effects(self.engine, self.place, self.running, self.submitted, time.monotonic())
        cpu = self._cpu_seconds() - cpu_before
        with self.engine.connect() as connection:
            first, last, done = connection.execute(DRAINED, {"type": TYPE, "since": since}).one()
        return Drained(done / (last - first).total_seconds(), (first - since).total_seconds(), cpu / done)

    def verify(self) -> int:
        """Raise MeasurementFailed unless every task had exactly one effect. Return how many were charged."""
        with self.engine.connect() as connection:
            found = tuple(connection.execute(EXACTLY).one())
            undone, leases = connection.execute(UNDONE).one()
            charged: int = connection.execute(CHARGED).scalar_one()
        if found != (self.submitted, self.submitted, 0, self.submitted - 1):
            message = f"{found[0]:,} effects of {found[1]:,} tasks instead of {self.submitted:,}."
            raise MeasurementFailed(f"{message} {self.place.last_output()}")
        if undone or leases:
            raise MeasurementFailed(f"{undone:,} tasks are not SUCCEEDED, {leases:,} leases left.")
        return charged

    def lose_child(self) -> list[float]:
        """Kill the child that runs a batch; return the seconds until each of its tasks started again."""
        name, victim = self._begin_round()
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return self._restarts(name, killed_at)

    def lose_worker(self) -> list[float]:
        """Kill the worker that runs a batch, with all its processes, while another one is running."""
        name, _victim = self._begin_round()
        lost = self._workers[0]
        self._start_worker()
        await_ready(self._workers, PATIENCE_SECONDS)
        killed_at = time.monotonic()
        lost.kill()
        self._workers.remove(lost)
        return self._restarts(name, killed_at)

    def _begin_round(self) -> tuple[str, int]:
        """Submit one batch; return the name of the round, and the pid of the child that runs it."""
        name = f"round-{next(self._names)}"
        answer(self.place, "ours", "lost", name, LOST_BATCH)
        (victim,) = self._await_files(f"{name}-victim", 1)
        return name, int(victim.read_text())

    def _restarts(self, name: str, killed_at: float) -> list[float]:
        files = self._await_files(f"{name}-started-*", LOST_BATCH)
        return [float(file.read_text()) - killed_at for file in files]

    def _cpu_seconds(self) -> float:
        """Return the CPU time so far of all processes of the workers, of beat and of PostgreSQL."""
        postgres = OwnProcess.read(Home(self.settings.celeriac_home).pid_file("postgres"))
        assert postgres is not None
        total = 0.0
        for pid in (postgres.pid, *(program.pid for program in self.running)):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += sum(process.cpu_times()[:2])
        return total

    def _start_worker(self) -> None:
        number = next(self._names)
        self._workers.append(self.place.start(f"work-{number}", "ours", ("work", 1, number)))

    def _await_files(self, pattern: str, count: int) -> list[Path]:
        """Wait until the handlers have written so many files."""
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while len(found := [file for file in self.place.folder.glob(pattern) if file.stat().st_size]) < count:
            self.place.require_alive(self.running)
            if time.monotonic() > give_up_at:
                raise MeasurementFailed(f"Only {len(found)} of {count} {pattern}. {self.place.last_output()}")
            time.sleep(0.005)
        return found


@contextmanager
def _system(variables: dict[str, str] | None = None) -> Iterator[_System]:
    with ExitStack() as stack:
        stack.enter_context(environment(HANDLERS | (variables or {})))
        settings = stack.enter_context(scratch_servers())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="celeriac-bench-"))
        engine = make_engine(settings.database_url)
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            connection.execute(sql(SINK))
        system = _System(settings, engine, Place(Path(folder)))
        stack.callback(system.stop)
        system.start()
        yield system
