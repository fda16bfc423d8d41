"""Random crashes of workers and recoveries, for every kind of sink, on temporary servers; then count the effects.

    warm up     this process runs one task of each kind, and records which windows a worker passes
    waves       forked children call the real `deliver`, `reclaim_leases` and `recover`. They are killed with SIGKILL at
                a window or at a random moment, or suspended there until another worker has taken over their task
    drain       without faults, until every task is final
    check       each task that is SUCCEEDED has one effect in each of its sinks, and nothing is left behind

A wave ends by moving the ledger's clock beyond all leases. So the tasks of dead and suspended workers are reclaimed,
and delivered again in the next waves. This process has no threads: a fork would inherit their locks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import settings
from chaos.sink_bugs import Bug, with_bug
from chaos.sink_check import Counted, count, examples
from chaos.sink_places import KINDS, Place, open_places
from chaos.sink_plan import Plan
from chaos.sink_workers import Workers, delivering, reclaim, recover_sinks, submit_tasks
from embedded.temporary_servers import environment, temporary_servers
from models import engine as engines
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from sinks.configuration import open_sinks
from tasks import Task, handler
from tasks.core import registry
from tasks.execution.heartbeat import heartbeat
from tasks.testing import forked_worker
from tasks.testing.windows import Window, read_windows

# Nothing here tests durability: processes are killed, servers are not.
CONFIGURATION: Final = {
    "fsync": "off",
    "max_prepared_transactions": "400",
    "scram_iterations": "1",  # each child opens new connections
    "jit": "off",
}
HITS_SHARE: Final = 100  # each window must be hit once in so many crashes, at least
SECONDS_FOR_EACH: Final = 0.5  # crash, on a busy machine
SECONDS_MORE: Final = 120.0
Report = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Result:
    """What the chaos has done, and what was counted afterwards."""

    seed: int
    seconds: float
    crashes: int
    hits: Mapping[str, int]  # by kind of task and window
    suspended: int  # workers that were suspended until they had lost their task
    counted: Counted
    violations: list[str]


def chaos_sinks(crashes: int, *, seed: int, bug: Bug | None = None, report: Report = lambda _: None) -> Result:
    """Let so many processes die, then count. `report` is called with the number of those that have died so far."""
    started_at = time.monotonic()
    with (
        temporary_servers(configuration=CONFIGURATION) as servers,
        environment(servers.variables | {"INGEST_HANDLERS": ""}),
        open_places(servers) as places,
        with_bug(bug),
        _configured(places),
    ):
        _warm_up()
        chance = random.Random(seed)  # noqa: S311 - not a secret
        plan = Plan({kind: _trace(kind) for kind in KINDS}, chance)
        with Workers(servers.superuser_url, plan, shows_errors=bug is None) as workers:
            workers.crash(crashes, report, give_up_at=started_at + SECONDS_MORE + SECONDS_FOR_EACH * crashes)
            workers.crash_rare(crashes // HITS_SHARE)
            workers.drain()
            counted = count(places)
        violations = counted.violations
        if workers.failed:
            violations.append(f"{len(workers.failed)} processes failed by themselves: {examples(workers.failed)}")
        if not counted.refused:
            violations.append("No late write was refused, so nothing was proved about them.")
        violations += [f"Hit only {plan.hits[str(job)]} times: {job}." for job in plan.rare(crashes // HITS_SHARE)]
        seconds = time.monotonic() - started_at
        return Result(seed, seconds, workers.crashes, dict(plan.hits), workers.suspensions, counted, violations)


@contextmanager
def _configured(places: Mapping[str, Place]) -> Iterator[None]:
    """Configure the sinks and register a handler for each kind of task."""
    os.environ["SINKS"] = json.dumps({name: place.setting for name, place in places.items()})
    settings.current.cache_clear()
    for sink in open_sinks().all():
        sink.prepare()
    for kind, sinks in KINDS.items():
        _register(kind, [places[name] for name in sinks])
    try:
        yield
    finally:
        for kind in KINDS:
            registry._registered.pop(f"chaos.{kind}", None)
        _forget_threads_and_connections()
        engines._engines.pop(settings.current().database_url).dispose()


def _register(kind: str, places: list[Place]) -> None:
    @handler(f"chaos.{kind}", transactional=False, batch=1, backoff=[0], max_attempts=1_000_000)
    def write(task: Task) -> None:
        for place in places:
            place.write(task)


def _warm_up() -> None:
    """Run one task of each kind in this process: its children find everything imported, and statements compiled."""
    for kind in KINDS:
        delivering(submit_tasks(kind, 1))()
    reclaim()
    recover_sinks()
    _forget_threads_and_connections()
    gc.collect()
    gc.freeze()  # otherwise the collector of each child would copy the memory that it shares with us


def _forget_threads_and_connections() -> None:
    made: tuple[Any, ...] = (heartbeat, after_commit_publisher, open_sinks)
    for each in made:
        if each.made:
            each.made.close()
            each.made = None
    engine().dispose()


def _trace(kind: str) -> list[Window]:
    """Return the windows that a worker passes with a task of this kind."""
    with tempfile.TemporaryDirectory(prefix="celeriac-chaos-") as folder:
        trace = Path(folder, "trace")
        pid = forked_worker.start(delivering(submit_tasks(kind, 1)), trace=str(trace))
        assert forked_worker.wait(pid).is_clean, f"a worker failed without a fault: {kind}"
        return read_windows(trace)
