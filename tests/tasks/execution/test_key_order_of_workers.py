"""Five thousand tasks of a hundred partition keys stay in order while real workers are killed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import settings
from chaos.programs import start_worker
from child_process import ChildProcess
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import ticks
from tests.tasks.order_handlers import CREATE
from tests.tasks.ordering import check_order, submit_all
from tests.tasks.own_servers import own_servers
from tests.tasks.work import rows


@pytest.fixture
def quick() -> Iterator[settings.Settings]:
    with own_servers({"INGEST_HANDLERS": "tests.tasks.order_handlers"}, CREATE) as current:
        yield current


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("quick")
def test_five_thousand_tasks_of_a_hundred_keys_stay_in_order_while_workers_are_killed(tmp_path: Path) -> None:
    dice = random.Random(5000)
    programs = [start(tmp_path, name) for name in ("one", "two")]
    killed = 0
    try:
        submit_all(dice, tasks=5000, keys=100)
        assert after_commit_publisher().wait_until_idle(20)
        deadline, next_kill = time.monotonic() + 400, time.monotonic() + 1
        while rows(where="status NOT IN ('SUCCEEDED') LIMIT 1 --"):
            assert time.monotonic() < deadline, rows("status, count(*)", "true GROUP BY status --")
            ticks.run("relay")
            ticks.run("reclaim")
            if killed < 40 and time.monotonic() > next_kill:
                next_kill = time.monotonic() + dice.uniform(0.2, 1)
                place = dice.randrange(2)
                killed += kill_a_child(dice, programs[place])
                if killed % 10 == 9:  # sometimes kill the whole worker
                    programs[place].kill()
                    programs[place] = start(tmp_path, f"after {killed}")
            time.sleep(0.1)
    finally:
        for program in programs:
            program.kill()
    check_order()
    assert killed > 5, "too few processes were killed to prove anything"
    lost = sql("SELECT count(*) FROM ledger.ingest_task_transition WHERE message LIKE '%was lost%'")
    with engine().begin() as connection:
        assert connection.execute(lost).scalar_one(), "no process was killed while it held a task"


def start(folder: Path, name: str) -> ChildProcess:
    program = start_worker(folder, name.replace(" ", "-"))
    program.await_ready()
    return program


def kill_a_child(dice: random.Random, program: ChildProcess) -> bool:
    children = psutil.Process(program.popen.pid).children()
    if not children:
        return False
    dice.choice(children).kill()
    return True
