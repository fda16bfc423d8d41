"""The order of partition keys under retries, kill -9 and two workers: no inversion, and every effect once (P9).

The sink has no unique key and counts its rows: an effect that comes twice, or before one that it must follow, shows.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator

import pytest

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import submitter
from tasks.execution.deliver import ingest
from tasks.recovery.reclaim import take_over
from tests.servers import ServersOfTests
from tests.tasks.deliveries import clean_sink, handled, leases, scalar
from tests.tasks.lost_workers import later, start_child
from tests.tasks.order_handlers import CREATE, KINDS, inside, outside
from tests.tasks.ordering import check_order, submit_all
from tests.tasks.work import rows

PLACES = ("ingest.after_claim", "ingest.in_handler", "ingest.after_effect", "ingest.after_settle")
RUNNING_TOGETHER = sql("""
    SELECT count(*) FROM (SELECT partition_key FROM ledger.ingest_task WHERE status = 'RUNNING'
                          GROUP BY partition_key HAVING count(DISTINCT lease_token) > 1) AS twice""")


@pytest.fixture(autouse=True)
def ledger(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServersOfTests]:
    monkeypatch.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "0")
    settings.current.cache_clear()
    with engine().begin() as connection:
        connection.execute(CREATE)
        connection.execute(sql("TRUNCATE public.test_order"))
    with (
        clean_sink(),
        handled(KINDS[0], inside, batch=7, backoff=[0]),
        handled(KINDS[1], outside, batch=4, transactional=False, backoff=[0]),
    ):
        yield stack
    with engine().begin() as connection:
        connection.execute(sql("DROP TABLE public.test_order"))


def open_ids() -> list[uuid.UUID]:
    return [id_ for (id_,) in rows("id", "status IN ('QUEUED', 'RETRYING')")]


def work(dice: random.Random) -> None:
    """What a worker gets: wake-ups in any order, some of them twice. In a child, until nothing is open."""
    while ids := open_ids():
        dice.shuffle(ids)
        for start in range(0, min(len(ids), 60), 5):
            ingest(engine(), ids[start : start + 5])


def storm(stack: ServersOfTests, dice: random.Random, *, seconds: float) -> int:
    """Two workers at once, killed at some place or wherever they are, and replaced. Returns how many were killed."""
    killed, deadline = 0, time.monotonic() + seconds
    workers: dict[int, float] = {}
    while time.monotonic() < deadline and (open_ids() or leases()):
        while len(workers) < 2:
            place = f"{dice.choice(PLACES)}=kill@{dice.randint(1, 4)}"  # soon, or a quick machine is done before
            seed = dice.random()
            pid = start_child(lambda seed=seed: work(random.Random(seed)), failpoints=place)  # type: ignore[misc]
            workers[pid] = time.monotonic() + dice.uniform(0.1, 0.6)
        for pid, until in list(workers.items()):
            if time.monotonic() > until and not os.waitpid(pid, os.WNOHANG)[0]:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                killed += 1
            elif time.monotonic() <= until:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                killed += os.WIFSIGNALED(status)
            del workers[pid]
        assert scalar(str(RUNNING_TOGETHER)) == 0, "two holders of one key"
        if dice.random() < 0.2:  # whoever is still there is late, and is refused
            later(stack, 61)
            take_over(engine(), settings.current())
        time.sleep(0.02)
    for pid in workers:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return killed


def weather(stack: ServersOfTests, *, tasks: int, keys: int, seconds: float) -> None:
    dice = random.Random(tasks)  # the same every time
    submit_all(dice, tasks=tasks, keys=keys)
    assert submitter().flush(20)
    killed = storm(stack, dice, seconds=seconds)
    while open_ids():  # what is left, in peace
        later(stack, 61)
        take_over(engine(), settings.current())
        work(dice)
    assert set(rows("status")) == {("SUCCEEDED",)}
    check_order()
    assert killed > 10, "nobody was killed: nothing is proved"
    assert scalar(
        "SELECT count(*) FROM ledger.ingest_task_transition WHERE from_status = 'RUNNING' AND to_status = 'RETRYING'"
    )
    assert leases() == 0


@pytest.mark.guarantee
def test_no_inversion_under_kills_retries_and_two_workers(ledger: ServersOfTests) -> None:
    weather(ledger, tasks=200, keys=10, seconds=2.5)
