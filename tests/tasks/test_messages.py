"""What a worker takes from the broker and what it leaves there: a bare `celery -A tasks worker`, on each broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.nodes.programs import celery, run
from tests.servers import wait_until
from tests.tasks.ledger import send_and_await_beat
from tests.tasks.queues import waiting

DEAD_LETTERS = Queue("ingest.dlq", Exchange("celeriac", type="direct"), routing_key="ingest.dlq")


class Canary:
    """Code inside a message: whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_bare_worker_works_on_every_queue_and_leaves_dead_letters_alone(celery_setup: Any) -> None:
    assert celery_setup.ready(ping=False, control=True, docker=True)
    with celery_setup.app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish({"id": "a dead task"}, exchange="celeriac", routing_key="ingest.dlq", declare=[DEAD_LETTERS])
        for queue in ("ingest", "system"):
            assert send_and_await_beat(celery_setup.app, queue=queue) == celery_setup.worker.hostname()
        assert waiting(connection, DEAD_LETTERS) == 1
        DEAD_LETTERS(connection.default_channel).delete()


def test_a_worker_answers_whoever_inspects_it(celery_setup: Any) -> None:
    answer = run(celery("-A", "tasks", "inspect", "ping"), {"BROKER_URL": celery_setup.broker.container.url})
    assert answer.returncode == 0, answer.stderr
    assert f"{celery_setup.worker.hostname()}: OK" in answer.stdout


@pytest.mark.parametrize("celery_broker", ["celery_redis_broker"], indirect=True)
def test_an_address_printed_before_a_restart_does_not_hide_the_running_stack(celery_setup: Any) -> None:
    broker = celery_setup.broker.container
    broker.home.write_stack({"BROKER_URL": broker.url})
    old_port = broker.home.ports({"old": 0}, wished={})["old"]
    printed = broker.url.replace(f":{broker.port}/", f":{old_port}/")
    assert printed != broker.url
    variables = {"CELERIAC_HOME": str(broker.home.path), "BROKER_URL": printed}
    answer = run(celery("-A", "tasks", "inspect", "ping"), variables)
    assert f"{celery_setup.worker.hostname()}: OK" in answer.stdout, answer.stderr


def test_a_pickled_message_is_refused_and_the_worker_lives_on(celery_setup: Any, tmp_path: Path) -> None:
    process = celery_setup.worker.container.process
    pid = process.pid
    canary = tmp_path / "canary"
    celery_setup.app.send_task("tasks.beat_seen", args=[Canary(canary)], serializer="pickle")
    wait_until(lambda: b"Refusing to deserialize" in process.logs(), "the worker refuses")
    send_and_await_beat(celery_setup.app)
    assert process.status == "running"
    assert process.pid == pid
    assert not canary.exists()
