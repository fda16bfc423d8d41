"""Workers are killed between Kafka and the ledger; every effect happens once, in a table without a unique key."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import settings
from chaos.handlers import CREATE
from child_process import ChildProcess
from failpoint import arm
from models.engine import engine
from models.sql import sql
from settings import ROOT
from tasks.kafka import intake
from tasks.kafka.intake import Intake
from tasks.kafka.worker import Worker
from tests.servers import wait_until
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, reclaimed, submitted_in_sql
from tests.tasks.work import SCRIPTS, effects, insert, rows, transitions


def killed_at(place: str) -> None:
    """Run a worker in a forked process that is killed at this failpoint."""
    pid = os.fork()
    if pid == 0:
        arm(f"{place}=kill")
        worker = Worker(engine(), Intake(settings.current()))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            worker.turn(0.1)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the worker never reached {place}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.guarantee
@pytest.mark.usefixtures("known_handlers")
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("kafka.before_commit", {("RUNNING", 1)}),  # the claim is committed, the offset is not
        ("kafka.after_commit", {("RUNNING", 0)}),  # the offset is committed, the handlers still run
        ("ingest.after_settle", {("SUCCEEDED", 1), ("SUCCEEDED", 0)}),  # the offset is being committed
    ],
)
def test_a_killed_worker_loses_and_doubles_no_effect(
    place: str, found: set[tuple[str, int]], topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getpid()
    monkeypatch.setattr(intake, "KEEP_SECONDS", 0.05)

    def script(each: Any, db: Any) -> None:
        insert(each, db)
        if place == "kafka.after_commit" and os.getpid() != ours:
            time.sleep(20)  # until Kafka has answered, where the failpoint kills it

    SCRIPTS["waits"] = script
    ids = submitted_in_sql(3, "test.scripted", '{"do": "waits"}')
    topic.wakeup_together(ids)
    killed_at(place)
    assert {(status, topic.progress().waiting) for (status,) in rows("status")} <= found
    reclaimed(topic.stack)
    one = worker()
    wait_until(lambda: one.turn(0.1) >= 0 and set(rows("status")) == {("SUCCEEDED",)}, "all tasks have succeeded")
    wait_until(lambda: one.turn(0.1) == 0 and not topic.progress().waiting, "the offsets are committed")
    assert effects() == dict.fromkeys(ids, 1)
    assert set(rows("attempt_count")) == {(0,)}


@contextmanager
def kafka_worker(folder: Path) -> Iterator[ChildProcess]:
    """Run `manage.py kafka-worker` with the settings of this test."""
    child = ChildProcess(
        "kafka-worker",
        [sys.executable, str(ROOT / "manage.py"), "kafka-worker"],
        log=folder / "log",
        ready_file=folder / "ready",
        environment={**os.environ, "INGEST_HANDLERS": "chaos.handlers"},
        cwd=ROOT,
    )
    try:
        child.await_ready()
        yield child
    finally:
        child.kill()


def holder() -> int | None:
    """Return the pid of the process that holds a lease."""
    with engine().begin() as connection:
        name = connection.execute(sql("SELECT holder FROM ledger.task_lease")).scalar()
    return int(name.removeprefix(f"{socket.gethostname()}:").partition("-")[0]) if name else None


@pytest.mark.guarantee
def test_a_killed_child_is_replaced_and_a_worker_that_is_told_to_end_releases_its_tasks(
    topic: Topic, tmp_path: Path
) -> None:
    with engine().begin() as connection:
        connection.execute(sql("DROP TABLE IF EXISTS public.chaos_effect"))
        connection.execute(CREATE)
    with kafka_worker(tmp_path) as parent:
        known = effects_to_come(topic, 4, seconds=0)
        wait_until(
            lambda: set(rows("status")) == {("SUCCEEDED",)},
            "the first tasks have succeeded",
        )
        ids = effects_to_come(topic, 4, seconds=0.2)
        wait_until(holder, "a child holds the tasks")
        first = holder()
        assert first not in (None, parent.pid)
        os.kill(first or 0, signal.SIGKILL)
        wait_until(
            lambda: set(rows("status")) == {("SUCCEEDED",)},
            "the tasks were reclaimed and run",
        )
        (said,) = {message for id_ in ids for (message,) in transitions(id_, "message") if message}
        assert said.startswith(f"the worker {socket.gethostname()}:{first}-")
        assert said.endswith(" was lost with its batch")
        more = effects_to_come(topic, 4, seconds=5)
        wait_until(holder, "the second child holds the tasks")
        parent.popen.terminate()
        assert parent.popen.wait(20) == 0
    assert holder() is None
    last = {row for id_ in more for row in transitions(id_)[-1:]}
    assert ("RUNNING", "QUEUED") in last
    assert last <= {("RUNNING", "QUEUED"), (None, "QUEUED")}  # slow tasks are not all claimed together
    assert set(rows("attempt_count")) == {(0,)}
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT task_id FROM public.chaos_effect")).scalars()
        assert Counter(found) == dict.fromkeys([*known, *ids], 1)
        connection.execute(sql("DROP TABLE public.chaos_effect"))


def effects_to_come(topic: Topic, count: int, *, seconds: float) -> list[uuid.UUID]:
    ids = submitted_in_sql(count, "chaos.effect", f'{{"seconds": {seconds}}}')
    topic.wakeup_together(ids)
    return ids
