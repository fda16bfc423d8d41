"""Measure whether long tasks of an async handler hold up the short ones beside them.

A place that becomes free is given to a waiting task at once. So tasks that take 30 s cost the others the places that
they occupy, and nothing else. Two measurements say so:

    a few    a long task occupies one in a hundred places for the whole time. The rate of the short tasks is compared
             with the rate without long tasks
    many     one in a hundred tasks is long. If there are places enough, the rate stays. Otherwise they soon occupy most
             of the places, whatever the system does. The time for which places were in use is then what can be
             compared, with the time for which they existed

The clock starts with all tasks submitted and stops when the last short task has SUCCEEDED.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.ingest import Goal
from bench.measure_system import Say, System, await_count, servers, working_system
from bench.peers.effect import CONCURRENCY, PROCESSES
from bench.peers.our_handlers import LONG_SECONDS, SHORT_SECONDS
from bench.peers.programs import MeasurementFailed, answer
from models.sql import sql

OURS: Final = System("ours, async", "ours", 1, type="bench.nap")
ONE_IN: Final = 100
SHORT_DONE: Final = sql("""
    SELECT count(*) FROM ledger.ingest_task
    WHERE type = 'bench.nap' AND status = 'SUCCEEDED' AND payload = jsonb_build_object('seconds', :short)
""")
LONG_STARTED: Final = sql("""
    SELECT count(*), coalesce(sum(least(:long, extract(epoch FROM ledger.ledger_now() - started.created_at))), 0)
    FROM ledger.ingest_task AS task JOIN ledger.ingest_task_transition AS started ON started.task_id = task.id
    WHERE type = 'bench.nap' AND payload = jsonb_build_object('seconds', :long) AND started.to_status = 'RUNNING'
""")


@dataclass(frozen=True, slots=True)
class Run:
    """Short tasks per second, the number of long ones, and the share of the time for which places were in use."""

    what: str
    short_per_second: float
    long_tasks: int
    in_use: float


def measure(*, count: int, concurrency: int, say: Say) -> list[Run]:
    """Run `count` tasks without long ones, with a few, and with many; `concurrency` of them at once in a process."""
    places = PROCESSES * concurrency
    return [
        run("no long task", count, places, say),
        run("a long task in 1 % of the places", count, places, say, every=count, long=places // ONE_IN),
        run("1 % of the tasks are long", count, places, say, every=ONE_IN, long=1),
    ]


def goals(runs: Sequence[Run]) -> list[Goal]:
    without, few, many = runs
    return [
        Goal("short tasks beside a few long ones : alone", few.short_per_second / without.short_per_second, 0.9),
        Goal(
            "with 1 % long tasks: the same, or the places in use",
            max(many.in_use, many.short_per_second / without.short_per_second),
            0.9,
        ),
    ]


def run(what: str, count: int, places: int, say: Say, *, every: int = 1, long: int = 0) -> Run:
    """Run tasks in so many places until the short ones are done. Of each `every` tasks the first `long` are long."""
    say(f"{what}: {count:,} tasks …")
    long_tasks = sum(n % every < long for n in range(count))
    short_tasks = count - long_tasks
    with servers(OURS, {CONCURRENCY: str(places // PROCESSES)}) as (engine, place):
        answer(place, "ours", "gates")
        answer(place, "ours", "naps", count, every, long)
        with working_system(place, OURS) as programs:
            place.await_all(programs)
            began_at = time.monotonic()
            place.open_gate()
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:

                def done() -> int:
                    return int(connection.execute(SHORT_DONE, {"short": SHORT_SECONDS}).scalar_one())

                seconds = await_count(done, place, programs, short_tasks, began_at) - began_at
                started, used = connection.execute(LONG_STARTED, {"long": LONG_SECONDS}).one()
        if started != long_tasks:
            raise MeasurementFailed(f"{started} of {long_tasks} long tasks have started once. {place.last_output()}")
    return Run(
        what, short_tasks / seconds, long_tasks, (float(used) + short_tasks * SHORT_SECONDS) / (places * seconds)
    )
