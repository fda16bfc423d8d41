"""A listener that keeps the state of tasks as Flower does, and tasks whose events it may see."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from typing import Any

from celery import Celery

from tasks.core.outcomes import Dead, ErrorCode, Failure
from tasks.core.task import Task
from tests.servers import wait_until


class Listener:
    """Keeps the state of every task as Flower does, from the events that reach the broker."""

    def __init__(self, app: Celery) -> None:
        self.state: Any = app.events.State()
        self._connection: Any = app.connection_for_read()
        self._receiver: Any = app.events.Receiver(self._connection, handlers={"*": self.state.event})
        self._is_subscribed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        assert self._is_subscribed.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(10)
        self._connection.release()

    def await_state(self, task: Task, state: str) -> Any:
        def found() -> Any:
            seen = self.state.tasks.get(str(task.id))
            return seen if seen and seen.state == state else None

        wait_until(lambda: found() is not None, f"the task is shown as {state}")
        return found()

    def _listen(self) -> None:
        with self._receiver.consumer_context() as (connection, _, _):
            while not self._receiver.should_stop:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.1)  # the first call subscribes
                self._is_subscribed.set()


def new_task() -> Task:
    return Task(uuid.uuid4(), "mail.send", {}, {}, "ingest", 5, 2, 3, None, None, None)  # type: ignore[arg-type]


def dead(sentence: str = "SMTPError: no such user") -> Dead:
    return Dead(Failure(ErrorCode.HANDLER_ERROR, sentence, "Traceback …"))
