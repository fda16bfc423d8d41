"""Measure what each kind of sink costs, as a ratio to one committed INSERT per task into the same database.

The cost is what a sink adds to a task: the time of tasks that write to the sink, minus the time of the same tasks with
a handler that does nothing. The committed INSERT is measured in the same way, in a handler that makes it without any
guarantee. For the ledger's own database the cost is the whole time of a task in a batch of the default size: there is
nothing to subtract, because the effect shares the commit of the batch. All run in this process, through the code that a
worker runs, on temporary durable servers.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from sqlalchemy import Engine, make_url, text

import settings
from bench.ingest import Goal
from bench.measure_system import Say
from bench.scratch import scratch_servers
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.temporary_servers import environment
from models.engine import engine, make_engine, sessions
from outbox.after_commit_publisher import after_commit_publisher
from sinks.configuration import open_sinks
from tasks import NewTask, handler, submit_many
from tasks.core.registry import DEFAULT_BATCH
from tasks.core.task import Task
from tasks.execution.deliver import deliver

CREATE: Final = text("CREATE TABLE public.bench_effect (task_id uuid NOT NULL, n integer NOT NULL)")
INSERT: Final = text("INSERT INTO public.bench_effect (task_id, n) VALUES (:task_id, :n)")
ATOMIC: Final = "atomic, in a batch"
WANTED: Final = {ATOMIC: 0.5, "keyed PostgreSQL": 1.5, "two-phase PostgreSQL": 5.0}
BATCH: Final = 100  # tasks of a round
ATOMIC_BATCH: Final = DEFAULT_BATCH


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds that a sink costs a task, and how many times an INSERT with its COMMIT that is."""

    sink: str
    ms: float
    inserts: float


@dataclass(frozen=True, slots=True)
class Found:
    insert_ms: float
    costs: list[Cost]


def goals(found: Found) -> list[Goal]:
    return [
        Goal(f"{cost.sink} : one committed INSERT", cost.inserts, WANTED[cost.sink], at_most=True)
        for cost in found.costs
        if cost.sink in WANTED
    ]


def measure(*, count: int, say: Say) -> Found:
    """Measure every kind in turn, a hundred tasks at a time, and return medians.

    A ratio compares two figures of the same round, a few seconds apart: the speed of a shared machine changes.
    """
    rounds: list[dict[str, float]] = []
    with _other_database() as other:
        _register_handlers(other)
        kinds: dict[str, Callable[[], float]] = {
            "nothing": partial(_tasks, "bench.nothing"),
            "INSERT": partial(_tasks, "bench.insert"),
            ATOMIC: lambda: _tasks("bench.atomic", ATOMIC_BATCH) * BATCH / ATOMIC_BATCH,
            **{kind: partial(_tasks, f"bench.{name}") for name, (kind, _) in SINKS.items()},
        }
        for name in SINKS:
            open_sinks().find(name).prepare()
        for done in range(-BATCH, count, BATCH):  # the first hundred open connections and are not counted
            say(f"{max(done, 0):,} of {count:,} tasks of each kind …")
            taken = {kind: run() / BATCH * 1000 for kind, run in kinds.items()}
            if done >= 0:
                rounds.append(costs(taken))
    return summarize(rounds)


def costs(taken: Mapping[str, float]) -> dict[str, float]:
    """Return what each kind adds to a task that does nothing. An effect in the ledger's database is a whole task."""
    return {kind: ms if kind == ATOMIC else ms - taken["nothing"] for kind, ms in taken.items() if kind != "nothing"}


def summarize(rounds: Sequence[Mapping[str, float]]) -> Found:
    kinds = [kind for kind in rounds[0] if kind != "INSERT"]
    middle = {kind: median(each[kind] for each in rounds) for kind in rounds[0]}
    ratios = {kind: median(each[kind] / each["INSERT"] for each in rounds if each["INSERT"] > 0) for kind in kinds}
    return Found(middle["INSERT"], [Cost(kind, middle[kind], ratios[kind]) for kind in kinds])


def _insert(db: Any, task_id: uuid.UUID) -> None:
    db.execute(INSERT, {"task_id": task_id, "n": 1})


def _to_database(task: Task, name: str) -> None:
    task.sink(name).run(_insert, task.id)


def _to_file(task: Task, name: str) -> None:
    task.sink(name).run(lambda folder: folder.write(f"{task.id}.json", {"n": 1}))


def _to_list(task: Task, name: str) -> None:
    task.sink(name).append("bench", {"n": 1})


# The name of each sink, its kind in words, and how a handler writes to it.
SINKS: Final[dict[str, tuple[str, Callable[[Task, str], None]]]] = {
    "keyed": ("keyed PostgreSQL", _to_database),
    "two_phase": ("two-phase PostgreSQL", _to_database),
    "files": ("folder of files", _to_file),
    "lists": ("Redis list", _to_list),
}


def _register_handlers(other: Engine) -> None:
    def insert(task: Task) -> None:
        with other.begin() as connection:
            _insert(connection, task.id)

    handler("bench.nothing", transactional=False, batch=BATCH)(_do_nothing)
    handler("bench.insert", transactional=False, batch=BATCH)(insert)
    handler("bench.atomic", batch=ATOMIC_BATCH)(_insert_in_transaction)
    for name, (_, write) in SINKS.items():
        handler(f"bench.{name}", transactional=False, batch=BATCH)(_writer(name, write))


def _do_nothing(_task: Task) -> None:
    """The work of a task without its effect."""


def _insert_in_transaction(task: Task, db: Any) -> None:
    _insert(db, task.id)


def _writer(name: str, write: Callable[[Task, str], None]) -> Callable[[Task], None]:
    def run(task: Task) -> None:
        write(task, name)

    run.__qualname__ = f"write_{name}"  # a type has one handler, which is known by its name
    return run


def _tasks(type_: str, count: int = BATCH) -> float:
    """Return the seconds that so many tasks take from their claim to SUCCEEDED."""
    with sessions()() as session:
        ids = [str(each.task_id) for each in submit_many(session, [NewTask(type_) for _ in range(count)])]
        session.commit()
    after_commit_publisher().wait_until_idle()
    began_at = time.perf_counter()
    deliver(engine(), ids)
    return time.perf_counter() - began_at


@contextmanager
def _other_database() -> Iterator[Engine]:
    """Start servers, create a second database on the same PostgreSQL, and name it in SINKS."""
    with scratch_servers() as current:
        postgres = Postgres(Home(current.celeriac_home), make_url(current.database_url).port or 0)
        postgres.create_database("bench_sink")
        url = engine().url.set(database="bench_sink").render_as_string(hide_password=False)
        other = make_engine(url)
        for each in (other, engine()):
            with each.begin() as connection:
                connection.execute(CREATE)
        named = {
            "keyed": {"url": url, "guarantee": "keyed"},
            "two_phase": {"url": url, "guarantee": "two_phase"},
            "files": {"url": (current.celeriac_home / "bench-files").as_uri(), "guarantee": "two_phase"},
            "lists": {"url": current.redis_url, "guarantee": "keyed"},
        }
        (current.celeriac_home / "bench-files").mkdir()
        with environment({**os.environ, "SINKS": json.dumps(named)}):
            settings.current.cache_clear()
            yield other
            open_sinks().close()
        other.dispose()
