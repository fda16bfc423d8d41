"""Flower is closed to strangers, and shows the tasks of the ledger as they are."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from settings import ROOT
from tests.nodes.process import LocalProcess
from tests.nodes.programs import environment
from tests.nodes.shared import SharedNodes
from tests.servers import ServersOfTests, wait_until
from tests.tasks.browser import page_in_browser, table_of
from tests.tasks.celery_settings import application
from tests.tasks.deliveries import submitted
from tests.tasks.web import get
from tests.tasks.work import task

TYPE = "demo.flaky"
RUN_TIME = 6  # the place of its column


class Flower(LocalProcess):
    """`celery -A tasks flower`, started in a folder of its own."""

    def __init__(self, folder: Path, servers: ServersOfTests, broker_url: str) -> None:
        self.port = servers.home.ports({"flower": 0}, wished={})["flower"]
        self.login = f"celeriac:{servers.home.secrets['flower']}"
        super().__init__(
            [sys.executable, "-m", "celery", "-A", "tasks", "flower", f"--port={self.port}", "--logging=error"],
            folder=folder,
            cwd=folder,
            environment=environment(
                PYTHONPATH=str(ROOT), BROKER_URL=broker_url, CELERIAC_HOME=str(servers.home.path), TZ="UTC"
            ),
            is_ready=lambda: get(self.port, "/healthcheck")[0] == 200,
        )

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return what it knows of each task."""
        found: dict[str, dict[str, Any]] = json.loads(get(self.port, "/api/tasks", login=self.login)[1])
        return found

    def await_states(self, ids: Sequence[uuid.UUID], states: Sequence[str]) -> None:
        def seen() -> list[str]:
            known = self.tasks()
            return [known.get(str(id_), {}).get("state", "") for id_ in ids]

        wait_until(lambda: seen() == list(states), f"Flower shows {states}")

    def address(self, page: str) -> str:
        return f"http://{self.login}@127.0.0.1:{self.port}/{page}"


@pytest.fixture(scope="module")
def flower(nodes: SharedNodes, servers: ServersOfTests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    flower = Flower(tmp_path_factory.mktemp("flower"), servers, nodes.redis().url)
    try:
        flower.await_ready()
        yield flower
    finally:
        flower.end()


@pytest.fixture
def app(nodes: SharedNodes, stack: ServersOfTests) -> Iterator[Celery]:
    """An application that sends to the broker of a running worker."""
    nodes.worker(nodes.redis())
    with application(nodes.redis().url) as app:
        yield app


def send(app: Celery, *payloads: Any, **how: Any) -> list[uuid.UUID]:
    """Submit tasks, and wake the worker with one message."""
    ids = [id_ for payload in payloads for id_ in submitted(1, TYPE, payload, **how)]
    app.send_task("tasks.ingest", args=[[str(id_) for id_ in ids]])
    return ids


def await_ledger(id_: uuid.UUID, status: str) -> None:
    wait_until(lambda: task(id_)["status"] == status, f"the task is {status}")


def await_events(app: Celery, flower: Flower) -> None:
    """Send tasks until Flower shows one: it switches events on a few seconds after its start."""

    def is_seen() -> bool:
        (id_,) = send(app, {})
        await_ledger(id_, "SUCCEEDED")
        return bool(flower.tasks())

    wait_until(is_seen, "Flower shows a task")


@contextmanager
def frozen(server: Any) -> Iterator[None]:
    server.kill("SIGSTOP")
    try:
        yield
    finally:
        server.kill("SIGCONT")


def test_flower_started_in_another_folder_listens_on_loopback_and_asks_for_the_generated_login(
    flower: Flower,
) -> None:
    sockets = psutil.Process(flower.pid).net_connections("inet")
    listening = [(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", flower.port)]
    assert get(flower.port, "/")[0] == 401
    assert get(flower.port, "/api/workers", login="celeriac:wrong")[0] == 401
    assert get(flower.port, "/", login=flower.login)[0] == 200


@pytest.mark.guarantee
def test_a_browser_shows_five_tasks_by_type_and_state_the_error_of_one_and_its_dead_letter(
    flower: Flower, app: Celery, tmp_path: Path
) -> None:
    await_events(app, flower)
    secret = "4111 1111"
    payloads: list[dict[str, Any]] = [{"card": secret}] * 4 + [{"permanent": "no such customer", "card": secret}]
    ids = send(app, *payloads)
    flower.await_states(ids, ["SUCCESS"] * 4 + ["FAILURE"])
    rows = table_of(page_in_browser(flower.address("tasks"), tmp_path))
    shown = {row[1].split()[0]: row for row in rows if row}
    for id_ in ids[:4]:
        assert shown[str(id_)][0::2][:2] == [TYPE, "SUCCESS"]
        assert re.fullmatch(r"[\d.]+ m?s", shown[str(id_)][RUN_TIME])
    dead = shown[str(ids[4])]
    assert [dead[0], *dead[2:5]] == [TYPE, "FAILURE", "0", "Permanent: no such customer"]
    assert {row[0] for row in shown.values()} == {TYPE}, "wake-ups and ticks are not shown"
    assert secret not in json.dumps(flower.tasks())

    before = dead_letters(flower)
    app.send_task("outbox.relay")
    wait_until(lambda: dead_letters(flower) == before + 1, "the dead letter is in its queue")
    shown_queues = {row[0]: row[1] for row in table_of(get(flower.port, "/broker", login=flower.login)[1]) if row}
    assert shown_queues.keys() == {"ingest", "ingest.dlq", "receipts", "system"}
    assert shown_queues["ingest.dlq"] == str(before + 1)


def dead_letters(flower: Flower) -> int:
    answer = json.loads(get(flower.port, "/api/queues/length", login=flower.login)[1])
    return next(int(queue["messages"]) for queue in answer["active_queues"] if queue["name"] == "ingest.dlq")


def test_tasks_are_settled_while_the_broker_is_frozen_and_flower_shows_them_afterwards(
    flower: Flower, app: Celery, nodes: SharedNodes
) -> None:
    await_events(app, flower)
    ids = send(app, {"sleep": 0.5}, {"sleep": 0.5, "permanent": "no"})
    wait_until(lambda: "RUNNING" in {task(id_)["status"] for id_ in ids}, "the worker has the message")
    with frozen(nodes.redis().process):
        await_ledger(ids[0], "SUCCEEDED")
        await_ledger(ids[1], "DEAD")
    flower.await_states(ids, ["SUCCESS", "FAILURE"])


def test_a_restarted_flower_shows_new_tasks(flower: Flower, app: Celery) -> None:
    await_events(app, flower)
    flower.restart()
    flower.await_ready()
    assert flower.tasks() == {}
    await_events(app, flower)
