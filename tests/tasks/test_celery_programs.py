"""What the programs say when they cannot start, and what beat says when it can. All are started at once, by the module:
each takes seconds, and beat's first tick five more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

import settings
from tests.nodes.process import LocalProcess
from tests.nodes.programs import celery, environment, finish, start
from tests.nodes.shared import SharedNodes
from tests.servers import wait_until
from tests.tasks.celery_settings import application

NOTHING_RUNS = "is not set and no stack runs in {home}: run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL."
NO_NUMBER = "INGEST_MAX_ATTEMPTS: input should be a valid integer"
NO_BROKER_THERE = {"BROKER_URL": "redis://127.0.0.1:1/0"}
BAD_SETTING = {"INGEST_MAX_ATTEMPTS": "x", **NO_BROKER_THERE}
STARTS_ONCE = {"REMAP_SIGTERM": "SIGQUIT"}  # only for speed: a bare worker begins once more with this
BEATS = {"bare": celery("beat"), "of the application": celery("-A", "tasks", "beat")}
# program, what is set, exit code, what it says
REFUSALS: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "a worker without a stack": (celery("-A", "tasks", "worker"), {}, 3, f"BROKER_URL {NOTHING_RUNS}"),
    "beat without a stack": (celery("beat"), {}, 3, f"BROKER_URL {NOTHING_RUNS}"),
    "a worker without a ledger": (
        celery("-A", "tasks", "worker"),
        NO_BROKER_THERE | STARTS_ONCE,
        3,
        f"DATABASE_URL {NOTHING_RUNS}",
    ),
    "a worker with a bad setting": (celery("-A", "tasks", "worker"), BAD_SETTING | STARTS_ONCE, 1, NO_NUMBER),
    "beat with a bad setting": (celery("beat"), BAD_SETTING, 1, NO_NUMBER),
    "Flower without a login": (
        celery("-A", "tasks", "flower"),
        {"FLOWER_BASIC_AUTH": "", **NO_BROKER_THERE},
        1,
        "Flower would be open to anyone: set FLOWER_BASIC_AUTH=user:password.",
    ),
}


@pytest.fixture(scope="module")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home without a stack")


@pytest.fixture(scope="module", autouse=True)
def beats(nodes: SharedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalProcess]]:
    """Each beat has a database of Redis for itself, where no worker takes the ticks away."""
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
def refused(beats: object, empty_home: Path) -> Iterator[dict[str, Popen[str]]]:
    with ExitStack() as ending:
        yield {
            name: ending.enter_context(start(command, CELERIAC_HOME=str(empty_home), **variables))
            for name, (command, variables, _, _) in REFUSALS.items()
        }


@pytest.mark.parametrize("name", REFUSALS)
def test_a_program_that_cannot_start_says_so_in_one_sentence(
    name: str, refused: dict[str, Popen[str]], empty_home: Path
) -> None:
    _, _, code, sentence = REFUSALS[name]
    done = finish(refused[name])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"celery: {sentence.format(home=empty_home)}")


@pytest.mark.parametrize("name", BEATS)
def test_beat_wakeups_the_system_queue_with_ticks_that_expire_and_leaves_no_file(
    name: str, beats: dict[str, LocalProcess]
) -> None:
    beat = beats[name]
    message = _first_message("system", beat)
    assert message.headers["task"] in {"tasks.beat_seen", "outbox.relay"}
    assert datetime.fromisoformat(message.headers["expires"]).tzinfo  # by how much: test_celeryconfig.py
    beat.stop()
    assert beat.popen.returncode == 0
    assert not list(settings.ROOT.glob("celerybeat*"))


def _first_message(queue: str, beat: LocalProcess) -> Any:
    found: list[Any] = []
    with application(beat.environment["BROKER_URL"]) as app, app.connection_for_read() as connection:
        place = app.amqp.queues[queue](connection.default_channel)

        def look() -> bool:
            assert beat.status == "running", beat.logs().decode()
            found.extend(filter(None, [place.get(no_ack=True)]))
            return bool(found)

        wait_until(look, f"a tick in the queue {queue}")
    return found[0]
