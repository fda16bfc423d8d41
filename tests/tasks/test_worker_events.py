"""A worker sends events about the tasks of the ledger, on every broker, and none about its messages."""

from __future__ import annotations

from typing import Any

from tests.servers import wait_until
from tests.tasks.deliveries import submitted
from tests.tasks.execution.event_listener import Listener
from tests.tasks.ledger import send_and_await_beat


def test_a_listener_gets_the_tasks_of_a_worker_and_not_its_wake_ups_and_ticks(celery_setup: Any) -> None:
    app = celery_setup.app
    with Listener(app) as listener:
        app.control.enable_events()
        ids: set[str] = set()

        def is_seen() -> bool:
            """Send one more task: the worker takes a moment to switch events on."""
            (id_,) = submitted(1, "demo.flaky", {"permanent": "no such customer"})
            ids.add(str(id_))
            app.send_task("tasks.ingest", args=[[str(id_)]])
            send_and_await_beat(app)
            return bool(listener.state.tasks)

        wait_until(is_seen, "a task is seen")
        wait_until(lambda: any(task.state == "FAILURE" for task in listener.state.tasks.values()), "it has failed")
        seen = list(listener.state.tasks.values())
    assert {task.uuid for task in seen} <= ids
    assert {(task.name, task.worker.hostname) for task in seen} == {("demo.flaky", celery_setup.worker.hostname())}
    assert "Permanent: no such customer" in {task.exception for task in seen}
