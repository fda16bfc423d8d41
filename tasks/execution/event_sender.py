"""Send the events of tasks to the broker, from threads of a worker's main process, while Flower listens.

One thread reads what the children report (`task_events.py`), so that their socket is never full for long. The other
publishes it a few times per second, over a connection of its own: a broker that hangs delays this thread and nothing
else. While it is delayed it grants no tasks, so only failures arrive, and of those the latest `WAITING_EVENTS` are
kept. After an error everything that was not published is published again.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from celery import Celery

from tasks.execution.task_events import Event, EventChannel

logger = logging.getLogger(__name__)

SHOWN_PER_SECOND: Final = 200  # tasks of one worker that do not fail; Flower keeps the latest 100,000 tasks
SEND_SECONDS: Final = 0.25
MESSAGE_EVENTS: Final = 300
WAITING_EVENTS: Final = 10_000
EXIT_PATIENCE_SECONDS: Final = 1.0


class EventSender:
    """The threads that send events as `hostname`. `is_wanted` returns None while the worker does not know."""

    def __init__(
        self, app: Celery, channel: EventChannel, *, hostname: str, is_wanted: Callable[[], bool | None]
    ) -> None:
        self.app = app
        self.channel = channel
        self.hostname = hostname
        self.is_wanted = is_wanted
        self._waiting: deque[Event] = deque(maxlen=WAITING_EVENTS)
        self._sending: list[Event] = []
        self._dispatcher: Any = None
        self._is_failing = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True)
            for work in (self._read_events, self._send_events)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Send what is there, and end. A worker calls this at its exit, because it settles tasks until then."""
        atexit.unregister(self.stop)
        threading.Thread(target=self.channel.end, daemon=True).start()
        self._threads[0].join(EXIT_PATIENCE_SECONDS)
        self._stopped.set()
        self._threads[1].join(EXIT_PATIENCE_SECONDS)

    def _read_events(self) -> None:
        while events := self.channel.read():
            self._waiting.extend(events)

    def _send_events(self) -> None:
        while not self._stopped.wait(SEND_SECONDS):
            self._send()
        self._send()
        self._drop_connection()

    def _send(self) -> None:
        if (wanted := self.is_wanted()) is not None:
            self.channel.switch(on=wanted)
        try:
            while self._sending or self._waiting:
                self._send_some()
            self.channel.grant(round(SHOWN_PER_SECOND * SEND_SECONDS), at_most=SHOWN_PER_SECOND)
            self._is_failing = False
        except Exception as error:  # of the broker's driver
            self._drop_connection()
            if not self._is_failing:
                logger.warning(
                    "Events for Flower are delayed: %s",
                    str(error).partition("\n")[0],
                    extra={"event": "flower_events_delayed"},
                )
            self._is_failing = True

    def _send_some(self) -> None:
        """Publish one message: the one that failed before, or the next."""
        if self._dispatcher is None:
            connection = self.app.connection_for_write()
            connection.ensure_connection(max_retries=0)
            self._dispatcher = self.app.events.Dispatcher(
                connection,
                hostname=self.hostname,
                buffer_group={"task"},
                buffer_limit=MESSAGE_EVENTS + 1,  # it would publish by itself
                buffer_while_offline=False,
            )
        while self._waiting and len(self._sending) < MESSAGE_EVENTS:
            self._sending.append(self._waiting.popleft())
        for event in self._sending:
            self._dispatcher.send(**event)
        self._dispatcher.flush(errors=False)
        self._sending.clear()

    def _drop_connection(self) -> None:
        """Close the connection without a handshake, which a broker that hangs would not answer."""
        dropped, self._dispatcher = self._dispatcher, None
        if dropped:
            with suppress(Exception):
                dropped.connection.collect()
