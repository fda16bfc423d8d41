"""Redis lists that grow at a checkpoint: values are collected, and appended by key when the checkpoint is decided.

    batch.sink("scores").append(entry, "league:1", {"points": 3})                 # the key comes from the entry
    batch.sink("scores").append(entry, "league:1", {"points": 3}, key="match-17")  # or is a business key

What was collected is in the handle, and so in the ledger's row of the checkpoint. A consumer that restarts appends it
without calling the handler again. A value whose key is known is not appended again, however often that happens.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from models.guarded_session import GuardedSession
from outbox.canonical_json import canonical_json
from receipts.streams.checkpoint_sinks import CheckpointAwareSink, Handle, OpenCheckpoint
from receipts.streams.entries import Entry
from sinks.contract import SinkMisused
from sinks.hash_tags import require_same_hash_tag
from sinks.redis_list import IdempotentRecord, RedisLists
from sinks.redis_script import PendingEntries, RedisScript, ScriptRecord


class CollectedRecords(CheckpointAwareSink):
    """Collects values for lists until the checkpoint is decided."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.records: list[ScriptRecord] = []
        self._keys: set[tuple[str, str, str]] = set()

    @property
    def writer(self) -> Any:
        return self

    def append(self, entry: Entry, list: str, value: Any, *, key: str | None = None) -> None:
        """Append the value, as JSON, to a list. Without a key, an entry can append one value to each list."""
        chosen = entry.effect_key(key)
        if (entry.id, list, chosen) in self._keys:
            raise SinkMisused(
                f"The entry {entry.id} appends two values with one key to the list {list!r}: give each its own `key`."
            )
        self._keys.add((entry.id, list, chosen))
        self.records.append(ScriptRecord(entry.id, list, chosen, canonical_json(value, what="value")))

    def on_checkpoint_start(self, _checkpoint_id: int, /) -> Handle | None:
        if not self.records:
            return None
        return {"records": [[each.entry_id, each.list, each.key, each.value] for each in self.records]}

    def write(self, db: GuardedSession) -> None:
        """Do nothing: what was collected is in the handle."""

    def on_checkpoint_complete(self, _checkpoint_id: int, /) -> None:
        if self.records:
            self.commit(self.records)
        self._forget()

    @abstractmethod
    def commit(self, records: list[ScriptRecord]) -> None:
        """Append the values whose keys are not known."""

    def on_checkpoint_abort(self, _checkpoint_id: int, /) -> None:
        self._forget()

    def on_checkpoint_restore(self, _checkpoint_id: int, handle: Handle, /) -> None:
        self.records = [ScriptRecord(*each) for each in handle["records"]]

    def _forget(self) -> None:
        self.records = []
        self._keys = set()


class CheckpointedIdempotentList(CollectedRecords):
    """Lists in any Redis: the script of `sinks/redis_list.py` checks the key and appends."""

    def __init__(self, sink: RedisLists) -> None:
        super().__init__(sink.name)
        self.sink = sink

    def append(self, entry: Entry, list: str, value: Any, *, key: str | None = None) -> None:
        self.sink.named(list)  # raises SinkMisused now, if the name cannot be used
        super().append(entry, list, value, key=key)

    def commit(self, records: list[ScriptRecord]) -> None:
        by_list: dict[str, list[IdempotentRecord[Any]]] = {}
        for each in records:
            by_list.setdefault(each.list, []).append(IdempotentRecord(each.key, json.loads(each.value)))
        for name, of_list in by_list.items():
            self.sink.named(name).append_all(of_list)


class CheckpointedScript(CollectedRecords):
    """Lists in the Redis of the stream: one script also acknowledges the entries (`sinks/redis_script.py`)."""

    def __init__(self, sink: RedisScript, checkpoint: OpenCheckpoint) -> None:
        super().__init__(sink.name)
        self.sink = sink
        self.pending = PendingEntries(checkpoint.shard.key, checkpoint.shard.group, checkpoint.shard.holder)

    def append(self, entry: Entry, list: str, value: Any, *, key: str | None = None) -> None:
        require_same_hash_tag(self.pending.stream, [list])
        super().append(entry, list, value, key=key)

    def commit(self, records: list[ScriptRecord]) -> None:
        self.sink.commit(self.pending, records)
