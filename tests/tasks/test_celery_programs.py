"""Celery's programs print one line when they cannot start; beat sends ticks, and a worker warns of a slow SIGTERM.

The module starts all programs at once: each takes seconds, and beat's first tick five more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

import settings
from tasks.core.celery_program import SIGTERM_WARNING
from tests.nodes.containers import WorkerNode
from tests.nodes.process import LocalProcess
from tests.nodes.programs import celery, environment, finish, start
from tests.nodes.shared import SharedNodes
from tests.servers import wait_until
from tests.tasks.celery_settings import application

NO_STACK = "is not set and no stack runs in {home}: run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL."
NOT_A_NUMBER = "INGEST_MAX_ATTEMPTS: input should be a valid integer"
CLOSED_PORT = {"BROKER_URL": "redis://127.0.0.1:1/0"}
BAD_SETTING = {"INGEST_MAX_ATTEMPTS": "x", **CLOSED_PORT}
BEATS = {"bare": celery("beat"), "of the application": celery("-A", "tasks", "beat")}
# environment variables of a worker, and whether it warns that SIGTERM waits for its handlers
SIGTERMS: dict[str, tuple[dict[str, str], bool]] = {
    "without the variable": ({}, True),
    "with SIGQUIT": ({"REMAP_SIGTERM": "SIGQUIT"}, False),
}
# program, environment variables, exit code, message
REFUSALS: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "a worker without a stack": (celery("-A", "tasks", "worker"), {}, 3, f"BROKER_URL {NO_STACK}"),
    "beat without a stack": (celery("beat"), {}, 3, f"BROKER_URL {NO_STACK}"),
    "a worker without a ledger": (celery("-A", "tasks", "worker"), CLOSED_PORT, 3, f"DATABASE_URL {NO_STACK}"),
    "a worker with a bad setting": (celery("-A", "tasks", "worker"), BAD_SETTING, 1, NOT_A_NUMBER),
    "beat with a bad setting": (celery("beat"), BAD_SETTING, 1, NOT_A_NUMBER),
    "Flower without a login": (
        celery("-A", "tasks", "flower"),
        {"FLOWER_BASIC_AUTH": "", **CLOSED_PORT},
        1,
        "Flower would be open to everyone: set FLOWER_BASIC_AUTH=user:password.",
    ),
}


@pytest.fixture(scope="module")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home without a stack")


@pytest.fixture(scope="module", autouse=True)
def beats(nodes: SharedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalProcess]]:
    """Start each beat with its own Redis database, from which no worker takes the ticks."""
    server = nodes.redis().url.removesuffix("/0")
    running = {
        name: LocalProcess(
            command,
            folder=tmp_path_factory.mktemp("beat"),
            cwd=settings.ROOT,
            environment=environment(BROKER_URL=f"{server}/{number}"),
            is_ready=lambda: True,
        )
        for number, (name, command) in enumerate(BEATS.items(), start=1)
    }
    yield running
    for beat in running.values():
        beat.end()


@pytest.fixture(scope="module", autouse=True)
def workers(nodes: SharedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalProcess]]:
    server = nodes.redis().url.removesuffix("/0")
    running = {
        name: WorkerNode(
            tmp_path_factory.mktemp("worker"),
            *("-n", f"sigterm{number}@%h", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle"),
            BROKER_URL=f"{server}/{number}",
            CELERIAC_HOME=str(nodes.ledger.path),
            WORKER_RUN_TICKS="false",
            LOG_FORMAT="json",
            **variables,
        ).process
        for number, (name, (variables, _)) in enumerate(SIGTERMS.items(), start=len(BEATS) + 1)
    }
    yield running
    for worker in running.values():
        worker.end()


@pytest.fixture(scope="module", autouse=True)
def refused(beats: object, empty_home: Path) -> Iterator[dict[str, Popen[str]]]:
    with ExitStack() as ending:
        yield {
            name: ending.enter_context(start(command, CELERIAC_HOME=str(empty_home), **variables))
            for name, (command, variables, _, _) in REFUSALS.items()
        }


@pytest.mark.parametrize("name", REFUSALS)
def test_a_program_that_cannot_start_prints_the_reason_in_one_line(
    name: str, refused: dict[str, Popen[str]], empty_home: Path
) -> None:
    _, _, code, sentence = REFUSALS[name]
    done = finish(refused[name])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"celery: {sentence.format(home=empty_home)}")


@pytest.mark.parametrize("name", BEATS)
def test_beat_sends_expiring_ticks_to_the_system_queue_and_leaves_no_file(
    name: str, beats: dict[str, LocalProcess]
) -> None:
    beat = beats[name]
    message = _first_message("system", beat)
    assert message.headers["task"] in {"tasks.beat_seen", "outbox.relay", "tasks.schedules"}
    assert datetime.fromisoformat(message.headers["expires"]).tzinfo
    beat.stop()
    assert beat.popen.returncode == 0
    assert not list(settings.ROOT.glob("celerybeat*"))


@pytest.mark.parametrize("name", SIGTERMS)
def test_a_worker_warns_only_if_sigterm_would_wait_for_its_handlers(
    name: str, workers: dict[str, LocalProcess]
) -> None:
    """Its operator would otherwise learn from Docker's SIGKILL that the variable is missing."""
    _, warns = SIGTERMS[name]
    workers[name].await_ready()
    assert workers[name].logs().decode().count(SIGTERM_WARNING) == warns
    assert len(_logged(workers[name], "sigterm_not_remapped")) == warns


@pytest.mark.parametrize("name", SIGTERMS)
def test_a_worker_logs_the_name_under_which_it_holds_leases(name: str, workers: dict[str, LocalProcess]) -> None:
    """The holder of a lease in the ledger can then be found in the logs of the worker."""
    workers[name].await_ready()
    (started,) = _logged(workers[name], "worker_started")
    assert started["message"].endswith(f" end with {started['worker']}.")
    assert re.fullmatch("[0-9a-f]{6}", started["worker"]), "see `holder_of`"


def _logged(worker: LocalProcess, event: str) -> list[dict[str, Any]]:
    """Return the JSON log lines that have this event."""
    lines = worker.logs().decode().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [each for each in found if each.get("event") == event]


def _first_message(queue: str, beat: LocalProcess) -> Any:
    found: list[Any] = []
    with application(beat.environment["BROKER_URL"]) as app, app.connection_for_read() as connection:
        bound = app.amqp.queues[queue](connection.default_channel)

        def has_message() -> bool:
            assert beat.status == "running", beat.logs().decode()
            found.extend(filter(None, [bound.get(no_ack=True)]))
            return bool(found)

        wait_until(has_message, f"a tick in the queue {queue}")
    return found[0]
