"""Partition keys stay in order under retries, kill -9 and two workers, and every effect happens once.

The table of effects has no unique key and numbers its rows, so a doubled effect or one out of order is found.
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
from outbox.after_commit_publisher import after_commit_publisher
from tasks.execution.deliver import deliver
from tasks.recovery.reclaim import reclaim_leases
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled, leases, scalar
from tests.tasks.lost_workers import later, start_child
from tests.tasks.order_handlers import CREATE, KINDS, inside, outside
from tests.tasks.ordering import check_order, submit_all
from tests.tasks.work import rows

PLACES = ("ingest.after_claim", "ingest.in_handler", "ingest.after_effect", "ingest.after_settle")
RUNNING_TOGETHER = sql("""
    SELECT count(*) FROM (SELECT partition_key FROM ledger.ingest_task WHERE status = 'RUNNING'
                          GROUP BY partition_key HAVING count(DISTINCT lease_token) > 1) AS twice""")


@pytest.fixture(autouse=True)
def ordered_handlers(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "0")
    settings.current.cache_clear()
    with engine().begin() as connection:
        connection.execute(CREATE)
        connection.execute(sql("TRUNCATE public.test_order"))
    with (
        handled(KINDS[0], inside, batch=7, backoff=[0]),
        handled(KINDS[1], outside, batch=4, transactional=False, backoff=[0]),
    ):
        yield
    with engine().begin() as connection:
        connection.execute(sql("DROP TABLE public.test_order"))


def open_ids() -> list[uuid.UUID]:
    return [id_ for (id_,) in rows("id", "status IN ('QUEUED', 'RETRYING')")]


def work(dice: random.Random) -> None:
    """Deliver open tasks in any order, some of them twice, until none is open."""
    while ids := open_ids():
        dice.shuffle(ids)
        for start in range(0, min(len(ids), 60), 5):
            deliver(engine(), ids[start : start + 5])


def kill_workers(stack: ServersOfTests, dice: random.Random, *, kills: int) -> int:
    """Run two workers at once; kill each at a failpoint or after some time, and replace it. Return the kills.

    It ends after `kills`, not after a time: how much happens in a time depends on the machine.
    """
    killed = 0
    workers: dict[int, float] = {}
    while killed < kills and (open_ids() or leases()):
        while len(workers) < 2:
            place = f"{dice.choice(PLACES)}=kill@{dice.randint(1, 4)}"  # soon, before all tasks are done
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
        assert scalar(str(RUNNING_TOGETHER)) == 0, "a key has two holders"
        if dice.random() < 0.2:  # the running workers lose their leases and can no longer write
            later(stack, 61)
            reclaim_leases(engine(), settings.current())
        time.sleep(0.02)
    for pid in workers:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return killed


@pytest.mark.guarantee
def test_keys_stay_in_order_under_kills_retries_and_two_workers(ledger: ServersOfTests) -> None:
    dice = random.Random(200)
    submit_all(dice, tasks=200, keys=10)
    assert after_commit_publisher().wait_until_idle(20)
    killed = kill_workers(ledger, dice, kills=12)
    while open_ids() or leases():  # finish the rest without kills
        later(ledger, 61)
        reclaim_leases(engine(), settings.current())
        work(dice)
    assert set(rows("status")) == {("SUCCEEDED",)}
    check_order()
    assert killed > 10, "too few workers were killed to prove anything"
    assert scalar(
        "SELECT count(*) FROM ledger.ingest_task_transition WHERE from_status = 'RUNNING' AND to_status = 'RETRYING'"
    )
    assert leases() == 0
