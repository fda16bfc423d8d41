"""A handler may run for longer than its broker waits for an acknowledgement: nothing runs twice, nothing is charged.

Redis delivers a message again after its visibility timeout (an hour). RabbitMQ closes the channel after its
`consumer_timeout` (half an hour), and delivers everything again that was reserved on it. Both are seconds here. The
messages are reserved by one process: the first runs for longer than that, the others wait behind it.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from celery import Celery

import settings
from chaos.programs import start_celery, wait_until
from child_process import ChildProcess
from models.engine import engine, sessions
from models.sql import sql
from tasks import NewTask, submit_many
from tests.nodes import rabbitmq
from tests.tasks.celery_settings import application
from tests.tasks.own_servers import own_servers
from tests.tasks.pool_handlers import CREATE
from tests.tasks.work import rows

VARIABLES = {"INGEST_HANDLERS": "tests.tasks.pool_handlers", "WORKER_RUN_TICKS": "false"}
LONG_SECONDS = 7.0
IMPATIENT_RABBIT = "[{rabbit, [{consumer_timeout, 3000}, {channel_tick_interval, 500}]}]."
RECEIVED = re.compile(r"Task tasks\.ingest\[(\S+)\] received")


@pytest.fixture(scope="module")
def servers() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current


@pytest.fixture(autouse=True)
def emptied(servers: settings.Settings) -> None:
    with engine().begin() as connection:
        connection.execute(sql("TRUNCATE public.pool_effect, ledger.ingest_task, ledger.task_lease"))


@dataclass(frozen=True, slots=True)
class LongWorker:
    """A worker with one process that reserves four messages, and the application that sends them."""

    program: ChildProcess
    app: Celery

    def send(self, *seconds: float) -> list[uuid.UUID]:
        with sessions()() as session:
            new = [NewTask("pool.effect", {"seconds": each}) for each in seconds]
            ids = [each.task_id for each in submit_many(session, new)]
            session.commit()
        for id_ in ids:
            self.app.send_task("tasks.ingest", [[str(id_)]])
        return ids

    def deliveries(self) -> Counter[str]:
        return Counter(RECEIVED.findall(self.program.output()))


@pytest.fixture(params=["redis", pytest.param("amqp", marks=[pytest.mark.guarantee, pytest.mark.slow])])
def worker(request: pytest.FixtureRequest, servers: settings.Settings, tmp_path: Path) -> Iterator[LongWorker]:
    node: rabbitmq.OwnRabbit | None = None
    url = servers.broker_url
    if request.param == "amqp":
        server = rabbitmq.find_server()
        if server is None:
            pytest.skip(rabbitmq.MISSING)
        node = rabbitmq.OwnRabbit(server, advanced=IMPATIENT_RABBIT)
        node.process.await_ready(60)
        url = node.url()
    program = start_celery(
        tmp_path,
        "long",
        *("worker", "-c", "1", "--prefetch-multiplier", "4", "-l", "INFO", "--without-gossip", "--without-mingle"),
        application="tests.tasks.impatient_app",
        BROKER_URL=url,
    )
    try:
        program.await_ready()
        with application(url) as app:
            yield LongWorker(program, app)
    finally:
        program.kill()
        if node:
            node.end()


def test_a_handler_that_outlives_the_patience_of_its_broker_runs_once_and_so_do_those_behind_it(
    worker: LongWorker,
) -> None:
    pid = worker.program.popen.pid
    long, *behind = worker.send(LONG_SECONDS, 0, 0)
    wait_until(lambda: not rows(where="status <> 'SUCCEEDED'"), "all succeeded", seconds=60)
    assert max(worker.deliveries().values()) > 1, "no message was delivered again, so nothing is proved"
    (later,) = worker.send(0)
    wait_until(lambda: rows(where=f"id = '{later}' AND status = 'SUCCEEDED'"), "it consumes again", seconds=30)
    assert set(rows("status, attempt_count")) == {("SUCCEEDED", 0)}
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT task_id, count(*) FROM public.pool_effect GROUP BY task_id"))
        assert dict(found.all()) == dict.fromkeys([long, *behind, later], 1)
    assert (worker.program.popen.poll(), worker.program.popen.pid) == (None, pid)
