"""Compare Celeriac with plain Celery, other queues and its own bare SQL: the same work, in one run, as ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.measure_system import (
    Latency,
    Memory,
    Rate,
    Say,
    System,
    latency,
    memory,
    one_by_one,
    submitting,
    throughput,
    waiting_rate,
)
from bench.peers.effect import AT_ONCE, PROCESSES
from bench.peers.our_handlers import MANY

# Fast systems get this many times more tasks, so that the measured time is long enough.
FAST: Final = 3
FASTEST: Final = 10
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
LIMIT_TASK: Final = System(
    "raw SQL, one INSERT per task",
    "raw_sql",
    MANY,
    programs=2,
    command="work_one_by_one",
    type="bench.task",
    times=FAST,
)
OURS_TASK: Final = System("ours, per-task handler, default batch", "ours", 1, type="bench.task", times=FAST)
OURS_SQLALCHEMY: Final = System(
    "ours, the same with SQLAlchemy's execute", "ours", 1, type="bench.sqlalchemy", times=FAST
)
OURS_HUNDRED: Final = System("ours, per-task handler, batch 100", "ours", 1, type="bench.hundred", times=FAST)
OURS_KEYED: Final = System(
    "ours, per-task handler, 1,000 partition keys", "ours", 1, type="bench.task", keys=1000, times=FAST
)
OURS_MANY: Final = (
    System("ours, many=True, batch 1000, prefetch 1", "ours", 1, type="bench.many", times=FASTEST),
    System("ours, many=True, batch 1000, prefetch 4", "ours", 4, type="bench.many", times=FASTEST),
)
# Tasks that wait for a slow HTTP server. Two processes of plain Celery run two of them at once, so they get fewer.
WAITING_PLAIN: Final = System("plain Celery, prefork", "plain_celery", 1)
WAITING_THREADS: Final = System(
    f"plain Celery, {AT_ONCE // PROCESSES} threads", "plain_celery", 1, programs=PROCESSES, command="work_in_threads"
)
WAITING_OURS: Final = System(f"ours, async, concurrency {AT_ONCE // PROCESSES}", "ours", 1, type="bench.wait")
WAITING: Final = 1000
FEW_WAITING: Final = 40


@dataclass(frozen=True, slots=True)
class Found:
    """All results of one run."""

    plain: list[Rate]
    peers: list[Rate]
    limit: Rate
    limit_task: Rate
    task: Rate
    hundred: Rate
    sqlalchemy: Rate
    many: list[Rate]
    keyed: Rate
    plain_one_by_one: float
    one_by_one: float
    one_by_one_in_sessions: float
    plain_latency: Latency
    latency: Latency
    bare_insert: float
    submit_many: float
    waiting: list[Rate]  # the last one is ours
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
    plain, many, task = fastest(found.plain), fastest(found.many), found.task.per_second
    reached = [Goal("per-task handler : plain Celery", task / plain, 13)]
    if found.peers:
        reached.append(Goal("per-task handler : best peer", task / fastest(found.peers), 3))
    waited = found.plain_latency
    reached += [
        Goal("per-task handler : raw SQL, one INSERT per task", task / found.limit_task.per_second, 0.75),
        Goal("many=True : raw SQL", many / found.limit.per_second, 0.9),
        Goal("1,000 partition keys : no key", found.keyed.per_second / task, 0.5),
        Goal("one by one : plain Celery", found.one_by_one / found.plain_one_by_one, 3),
        Goal("submit → start, p50 : plain Celery", found.latency.p50_ms / waited.p50_ms, 2, at_most=True),
        Goal("submit → start, p99 : plain Celery", found.latency.p99_ms / waited.p99_ms, 2.5, at_most=True),
        Goal("submit_many : bare INSERTs", found.submit_many / found.bare_insert, 0.6),
        Goal("1,000 tasks that wait 200 ms, async, s", WAITING / found.waiting[-1].per_second, 4, at_most=True),
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
    systems = (
        *(PEERS if with_peers else ()),
        *PLAIN,
        OURS_HUNDRED,
        OURS_KEYED,
        OURS_SQLALCHEMY,
        OURS_TASK,
        LIMIT_TASK,
        *OURS_MANY,
        LIMIT,
    )
    rates: dict[str, list[Rate]] = {system.name: [] for system in systems}
    ones: dict[str, list[float]] = {PLAIN[0].name: [], OURS_TASK.name: []}
    in_sessions = []
    waits: dict[str, list[Latency]] = {name: [] for name in ones}
    bare, ours = [], []
    waiting: dict[str, list[Rate]] = {system.name: [] for system in (WAITING_PLAIN, WAITING_THREADS, WAITING_OURS)}
    for _ in range(rounds):
        for system in systems:
            rates[system.name].append(throughput(system, count * system.times, say))
        for system in (PLAIN[0], OURS_TASK):
            ones[system.name].append(one_by_one(system, count, say))
            waits[system.name].append(latency(system, singles, say))
        in_sessions.append(one_by_one(OURS_TASK, count, say, in_sessions=True))
        bare.append(submitting(LIMIT, ("insert", FAST * count), say))
        ours.append(submitting(OURS_TASK, ("submit", FAST * count, "bench.task"), say))
        for system, how_many in ((WAITING_PLAIN, FEW_WAITING), (WAITING_THREADS, WAITING), (WAITING_OURS, WAITING)):
            waiting[system.name].append(waiting_rate(system, how_many, say))
    best = {name: max(found, key=lambda rate: rate.per_second) for name, found in rates.items()}
    shortest = {name: min(found, key=lambda wait: wait.p99_ms) for name, found in waits.items()}
    return Found(
        plain=[best[system.name] for system in PLAIN],
        peers=[best[system.name] for system in PEERS if system.name in best],
        limit=best[LIMIT.name],
        limit_task=best[LIMIT_TASK.name],
        task=best[OURS_TASK.name],
        hundred=best[OURS_HUNDRED.name],
        sqlalchemy=best[OURS_SQLALCHEMY.name],
        many=[best[system.name] for system in OURS_MANY],
        keyed=best[OURS_KEYED.name],
        plain_one_by_one=max(ones[PLAIN[0].name]),
        one_by_one=max(ones[OURS_TASK.name]),
        one_by_one_in_sessions=max(in_sessions),
        plain_latency=shortest[PLAIN[0].name],
        latency=shortest[OURS_TASK.name],
        bare_insert=max(bare),
        submit_many=max(ours),
        waiting=[max(rates, key=lambda rate: rate.per_second) for rates in waiting.values()],
        memory=memory(OURS_TASK, *memory_tasks, say) if memory_tasks else None,
    )
