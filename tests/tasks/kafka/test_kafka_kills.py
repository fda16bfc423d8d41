"""kill -9 of workers between Kafka and the ledger: every effect is there once, in a sink without a unique key."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
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
    """A worker in a child of this process, which ends there."""
    pid = os.fork()
    if pid == 0:
        arm(f"{place}=kill")
        worker = Worker(engine(), Intake(settings.current()))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            worker.turn(0.1)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it was never at {place}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("kafka.before_commit", {("RUNNING", 1)}),  # the guard has committed, and Kafka has heard nothing
        ("kafka.after_commit", {("RUNNING", 0)}),  # Kafka has forgotten them, and their handler has not ended
        ("ingest.after_settle", {("SUCCEEDED", 1), ("SUCCEEDED", 0)}),  # the commit of the offset may be under way
    ],
)
def test_a_worker_that_is_killed_leaves_each_effect_once(
    place: str, found: set[tuple[str, int]], topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getpid()
    monkeypatch.setattr(intake, "KEEP_SECONDS", 0.05)

    def script(each: Any, db: Any) -> None:
        insert(each, db)
        if place == "kafka.after_commit" and os.getpid() != ours:
            time.sleep(20)  # until the answer of Kafka has come, and with it the end

    SCRIPTS["waits"] = script
    ids = submitted_in_sql(3, "test.scripted", '{"do": "waits"}')
    topic.wakeup_together(ids)
    killed_at(place)
    assert {(status, topic.progress().waiting) for (status,) in rows("status")} <= found
    reclaimed(topic.stack)
    one = worker()
    wait_until(lambda: one.turn(0.1) >= 0 and set(rows("status")) == {("SUCCEEDED",)}, "all have succeeded")
    wait_until(lambda: one.turn(0.1) == 0 and not topic.progress().waiting, "the offsets are committed")
    assert effects() == dict.fromkeys(ids, 1)
    assert set(rows("attempt_count")) == {(0,)}


@contextmanager
def kafka_worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`manage.py kafka-worker`, with the settings of this test."""
    ready, log = folder / "ready", folder / "log"
    environment = {**os.environ, "INGEST_HANDLERS": "chaos.handlers", "CELERIAC_READY_FILE": str(ready)}
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "kafka-worker"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: ready.exists() or popen.poll() is not None, "the worker is ready")
        assert popen.poll() is None, log.read_text()
        yield popen
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def holder() -> int | None:
    """The process that has tasks in its hands."""
    with engine().begin() as connection:
        name = connection.execute(sql("SELECT holder FROM ledger.task_lease")).scalar()
    return int(name.removeprefix(f"{socket.gethostname()}:").partition("-")[0]) if name else None


@pytest.mark.guarantee
def test_a_child_that_is_killed_is_replaced_and_a_worker_that_is_told_to_end_gives_back(
    topic: Topic, tmp_path: Path
) -> None:
    with engine().begin() as connection:
        connection.execute(sql("DROP TABLE IF EXISTS chaos_effect"))
        connection.execute(CREATE)
    with kafka_worker(tmp_path) as parent:
        known = effects_to_come(topic, 4, seconds=0)
        wait_until(lambda: set(rows("status")) == {("SUCCEEDED",)}, "it knows the type, and takes more than one")
        ids = effects_to_come(topic, 4, seconds=0.2)
        wait_until(holder, "a child has them")
        first = holder()
        assert first not in (None, parent.pid)
        os.kill(first or 0, signal.SIGKILL)
        wait_until(
            lambda: set(rows("status")) == {("SUCCEEDED",)}, "its parent has taken over, and another has run them"
        )
        (said,) = {message for id_ in ids for (message,) in transitions(id_, "message") if message}
        assert said.startswith(f"the worker {socket.gethostname()}:{first}-")
        assert said.endswith(" was lost with its batch")
        more = effects_to_come(topic, 4, seconds=5)
        wait_until(holder, "the second child has them")
        parent.terminate()
        assert parent.wait(20) == 0
    assert holder() is None
    last = {row for id_ in more for row in transitions(id_)[-1:]}
    assert ("RUNNING", "QUEUED") in last
    assert last <= {("RUNNING", "QUEUED"), (None, "QUEUED")}  # slow ones are not taken all at once
    assert set(rows("attempt_count")) == {(0,)}
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT task_id FROM chaos_effect")).scalars()
        assert Counter(found) == dict.fromkeys([*known, *ids], 1)
        connection.execute(sql("DROP TABLE chaos_effect"))


def effects_to_come(topic: Topic, count: int, *, seconds: float) -> list[uuid.UUID]:
    ids = submitted_in_sql(count, "chaos.effect", f'{{"seconds": {seconds}}}')
    topic.wakeup_together(ids)
    return ids
