"""Which messages a plain `celery -A tasks worker` takes from each broker, and which it leaves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.ledger_fixtures import RABBITMQ
from tests.nodes.programs import celery, run
from tests.servers import wait_until
from tests.tasks.held import Held
from tests.tasks.ledger import beat_finished_at, send_and_await_beat
from tests.tasks.queues import waiting

DEAD_LETTERS = Queue("ingest.dlq", Exchange("celeriac", type="direct"), routing_key="ingest.dlq")


class Canary:
    """Code inside a message: unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_plain_worker_consumes_every_queue_but_the_dead_letters(celery_setup: Any) -> None:
    assert celery_setup.ready(ping=False, control=True, docker=True)
    with celery_setup.app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish({"id": "a dead task"}, exchange="celeriac", routing_key="ingest.dlq", declare=[DEAD_LETTERS])
        for queue in ("ingest", "system"):
            assert send_and_await_beat(celery_setup.app, queue=queue) == celery_setup.worker.hostname()
        assert waiting(connection, DEAD_LETTERS) == 1
        DEAD_LETTERS(connection.default_channel).delete()


def test_a_full_work_queue_does_not_delay_a_tick(celery_setup: Any, held: Held) -> None:
    held.put(celery_setup.app, messages=102, seconds=0.01)
    held.started(2)  # both children are busy, and a hundred messages are ahead of the tick
    celery_setup.app.send_task("tasks.beat_seen")
    held.finish(messages=102)
    ticked_at = beat_finished_at()
    assert sum(moment < ticked_at for moment in held.finished_at) < 30


@pytest.mark.parametrize("celery_broker", [RABBITMQ], indirect=True)
def test_the_broker_given_on_the_command_line_wins_over_the_running_stack(celery_setup: Any) -> None:
    name = celery_setup.worker.hostname()
    answer = run(celery("-A", "tasks", "-b", celery_setup.broker.container.url, "inspect", "-d", name, "ping"))
    assert answer.returncode == 0, answer.stderr
    assert f"{name}: OK" in answer.stdout


@pytest.mark.parametrize("celery_broker", ["celery_redis_broker"], indirect=True)
def test_an_address_printed_before_a_restart_does_not_hide_the_running_stack(celery_setup: Any) -> None:
    broker = celery_setup.broker.container
    broker.home.write_stack({"BROKER_URL": broker.url})
    old_port = broker.home.ports({"old": 0}, wished={})["old"]
    printed = broker.url.replace(f":{broker.port}/", f":{old_port}/")
    assert printed != broker.url
    name = celery_setup.worker.hostname()
    command = celery("-A", "tasks", "inspect", "-d", name, "ping")  # -d: do not wait for other workers
    answer = run(command, CELERIAC_HOME=str(broker.home.path), BROKER_URL=printed)
    assert answer.returncode == 0, answer.stderr
    assert f"{name}: OK" in answer.stdout


def test_a_pickled_message_is_refused_and_the_worker_keeps_running(celery_setup: Any, tmp_path: Path) -> None:
    process = celery_setup.worker.container.process
    pid = process.pid
    canary = tmp_path / "canary"
    celery_setup.app.send_task("tasks.beat_seen", args=[Canary(canary)], serializer="pickle")
    wait_until(lambda: b"Refusing to deserialize" in process.logs(), "the worker refuses the message")
    send_and_await_beat(celery_setup.app)
    assert process.status == "running"
    assert process.pid == pid
    assert not canary.exists()
