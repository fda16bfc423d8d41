"""Sinks in the ledger's own database: effects that commit in the transaction that writes SUCCEEDED.

    task.sink("ledger").run(record, amount)      calls `record(db, amount)` in that transaction (atomic)
    task.sink("orders").add({"order": 17})       adds an outbox event in that transaction

The calls are deferred until the handler has returned, so they return nothing, and an error in them is a failure of the
task. If the transaction has to be repeated, they are called again; what they wrote before was rolled back.

The event of an outbox sink exists once. Its destination may still see it twice, when a confirmation is lost, and can
recognise it by its id. Kafka is reached this way: a transaction of a Kafka producer cannot include the ledger, so it
could not commit together with SUCCEEDED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from sqlalchemy.orm import Session

import settings
from outbox.destinations import UnknownDestination, open_destination
from outbox.new_events import add
from sinks.contract import Guarantee, Sink, SinkNotReady


class TaskThatDefers(Protocol):
    """What these sinks need of the running task (`task_sinks.py`)."""

    def check_lease(self) -> None: ...

    def defer(self, write: Callable[[Session], object]) -> None: ...


class LedgerSink(Sink):
    """The ledger's own database."""

    guarantee: ClassVar[Guarantee] = Guarantee.ATOMIC

    def __init__(self, name: str, url: str) -> None:
        del url
        self.name = name

    @property
    def conditions(self) -> Sequence[str]:
        return ["The effect is in the ledger's database: it commits in the transaction that writes SUCCEEDED."]

    def bind(self, task: TaskThatDefers) -> BoundLedger:
        return BoundLedger(task)

    def check(self) -> str:
        return "the ledger's own database"

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class BoundLedger:
    """`task.sink(name)` for the ledger's own database."""

    task: TaskThatDefers

    def run(self, function: Callable[..., object], *arguments: Any, step: str = "") -> None:
        """Call `function(db, *arguments)` in the transaction that writes SUCCEEDED."""
        del step
        self.task.check_lease()
        self.task.defer(lambda db: function(db, *arguments))


class OutboxSink(LedgerSink):
    """A destination of the outbox."""

    guarantee: ClassVar[Guarantee] = Guarantee.AT_LEAST_ONCE

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url)
        self.destination = url.partition(":")[2]

    @property
    def conditions(self) -> Sequence[str]:
        return [
            "The event is added exactly if the task is SUCCEEDED.",
            f"The destination {self.destination!r} may see it twice; it can recognise it by its id.",
        ]

    def bind(self, task: TaskThatDefers) -> BoundOutbox:  # type: ignore[override]
        return BoundOutbox(self.destination, task)

    def check(self) -> str:
        try:
            open_destination(self.destination, settings.current()).publisher.close()
        except UnknownDestination as error:
            raise SinkNotReady(f"Sink {self.name}: {error}") from None
        return f"destination {self.destination}"


@dataclass(frozen=True, slots=True)
class BoundOutbox:
    """`task.sink(name)` for a destination of the outbox."""

    destination: str
    task: TaskThatDefers

    def add(self, payload: Any, *, headers: Mapping[str, Any] | None = None, ordering_key: str | None = None) -> None:
        """Add an event in the transaction that writes SUCCEEDED."""
        self.task.check_lease()
        self.task.defer(lambda db: add(db, self.destination, payload, headers=headers, ordering_key=ordering_key))
