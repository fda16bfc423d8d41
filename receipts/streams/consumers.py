"""The consumers of streams that this installation has, registered in code.

    register(StreamConsumer("save", "orders", save_orders, sinks=("billing",)))

`save_orders(batch)` is called with entries of the stream `orders` and writes to `batch.sink("billing")`. The name of
the consumer is its consumer group, so two consumers of one stream each get all of its entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import settings
from models.errors import Misuse
from receipts.streams.entries import Batch
from tasks.core.holders import holder_of

if TYPE_CHECKING:
    from receipts.streams.checkpoint_sinks import CheckpointAwareSink
    from receipts.streams.source import StreamSource


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on which new entries may be read: Lua that sets `is_open`, with further keys and values.

    A gate that was open must stay open as long as the key `watched` does not change.
    """

    lua: str
    keys: tuple[str, ...]  # KEYS[3] and following
    values: tuple[str, ...]  # ARGV[1] and following
    watched: str


@dataclass(frozen=True, slots=True)
class StreamConsumer:
    """A handler for the entries of a stream, and the names of the sinks that it writes to."""

    name: str
    stream: str
    handler: Callable[[Batch], object]
    sinks: tuple[str, ...] = ()
    shards: int = 1  # streams named `stream:0`, `stream:1`, …; one alone has the name of the stream
    own_sinks: Callable[[Any], Sequence[CheckpointAwareSink]] = lambda _run: ()  # that SINKS does not name
    acknowledge: Callable[[StreamSource, Sequence[str]], int] | None = None  # None: XACK
    gate: Gate | None = None
    defers_ack: bool | None = None  # None: CHECKPOINT_DEFER_ACK
    lease_seconds: float | None = None  # None: CHECKPOINT_CLAIM_IDLE_MS
    make_run: Callable[[Any, Any], Any] | None = None  # of a shard and its lease; None: `ShardRun`


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a stream, as this process consumes it."""

    consumer: StreamConsumer
    number: int
    group: str
    holder: str

    @classmethod
    def of(cls, consumer: StreamConsumer, number: int, *, holder: str | None = None) -> Shard:
        group = settings.current().broker_queue(consumer.name)
        return cls(consumer, number, group, holder or holder_of(os.getpid()))

    @property
    def key(self) -> str:
        """The key of the stream in Redis."""
        return self.consumer.stream if self.consumer.shards == 1 else f"{self.consumer.stream}:{self.number}"

    @property
    def stream(self) -> str:
        """The name of the stream in the ledger. It contains the group, because several may read one stream."""
        return f"{self.key}@{self.group}"

    @property
    def lease_seconds(self) -> float:
        return self.consumer.lease_seconds or settings.current().checkpoint_claim_idle_ms / 1000


_registered: Final[dict[str, StreamConsumer]] = {}


def register(consumer: StreamConsumer) -> None:
    """Add a consumer. Workers must do so before they consume, for example in a module of INGEST_HANDLERS."""
    if _registered.get(consumer.name, consumer) != consumer:
        raise Misuse(f"The consumer {consumer.name!r} is registered twice.")
    _registered[consumer.name] = consumer


def all_shards() -> Iterator[Shard]:
    """Return every shard of every registered consumer."""
    for consumer in _registered.values():
        for number in range(consumer.shards):
            yield Shard.of(consumer, number)
