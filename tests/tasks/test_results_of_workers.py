"""With real workers: results are waited for, cancelled handlers are interrupted, and Sentry gets failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import tasks
from chaos.programs import start_worker, wait_until
from child_process import ChildProcess
from models.engine import engine
from tests.tasks.own_servers import own_servers
from tests.tasks.result_handlers import CREATE, FILE, SECRET
from tests.tasks.work import transitions

VARIABLES = {"INGEST_HANDLERS": "tests.tasks.result_handlers", "INGEST_LEASE_SECONDS": "60"}
EFFECTS = text("SELECT note FROM public.result_effect WHERE task_id = :id")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[ChildProcess]:
    with own_servers(VARIABLES, CREATE):
        program = start_worker(folder, "results", LOG_FORMAT="json", **{FILE: str(folder / "written")})
        try:
            program.await_ready()
            yield program
        finally:
            program.kill()


def written(folder: Path, kind: str) -> list[Any]:
    """Return what the processes of the worker have written into the file."""
    lines = map(json.loads, (folder / "written").read_text().splitlines())
    return [what for each, what in lines if each == kind]


@pytest.mark.usefixtures("worker")
def test_the_result_of_a_worker_is_waited_for() -> None:
    found = tasks.wait(tasks.submit(engine(), "results.add", [1, 2, 3]).task_id, timeout=30)
    assert (found.status, found.result) == ("SUCCEEDED", 6)


@pytest.mark.guarantee
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("type_", ["results.inside", "results.outside"])
def test_cancelling_a_running_task_interrupts_its_handler(type_: str) -> None:
    id_ = tasks.submit(engine(), type_).task_id
    wait_until(lambda: tasks.get(id_).status == "RUNNING", "the task runs", seconds=30)
    assert tasks.cancel(id_, reason="no longer needed") == "RUNNING"
    assert tasks.wait(id_, timeout=5).status == "DISCARDED"

    def effects() -> list[str]:
        with engine().connect() as connection:
            return list(connection.execute(EFFECTS, {"id": id_}).scalars())

    wait_until(effects, "the handler is interrupted", seconds=30)
    assert effects() == ["interrupted"]  # what it wrote in its transaction was rolled back
    assert transitions(id_, "to_status, message")[-1] == ("DISCARDED", "no longer needed")
    # The process is free again.
    found = tasks.wait(tasks.submit(engine(), "results.add", [1]).task_id, timeout=30)
    assert found.status == "SUCCEEDED"


def test_sentry_gets_the_last_attempt_once_and_our_log_does_not_show_its_text(
    worker: ChildProcess, folder: Path
) -> None:
    id_ = tasks.submit(engine(), "results.fails").task_id
    assert tasks.wait(id_, timeout=30).status == "DEAD"

    def captured() -> list[Any]:
        return [each for each in written(folder, "sentry") if each["extra"]["taskId"] == str(id_)]

    wait_until(captured, "Sentry has an event", seconds=10)
    (event,) = captured()
    (error,) = event["exception"]["values"]
    assert (error["type"], error["value"], event["level"]) == ("CardRefused", SECRET, "error")
    assert error["stacktrace"]["frames"][-1]["function"] == "fail"
    assert (event["logger"], event["extra"]["taskId"], event["extra"]["type"]) == (
        "tasks.outcomes",
        str(id_),
        "results.fails",
    )
    lines = [json.loads(line) for line in worker.output().splitlines() if line.startswith("{")]
    events = [(line["event"], line["level"]) for line in lines if line.get("taskId") == str(id_)]
    assert events == [("task_failed", "WARNING"), ("task_dead", "ERROR")]
    assert SECRET not in worker.output()


@pytest.mark.usefixtures("worker")
def test_signals_of_a_worker_are_sent_once_per_attempt(folder: Path) -> None:
    id_ = str(tasks.submit(engine(), "results.fails").task_id)
    tasks.wait(id_, timeout=30)

    def names() -> list[str]:
        return [name for name, type_, its_id in written(folder, "signal") if its_id == id_ and type_ == "results.fails"]

    wait_until(lambda: "task_failure" in names(), "the last signal was sent", seconds=10)
    call = ["task_prerun", "task_postrun"]
    assert names() == [*call, "task_retry", *call, "task_failure"]
