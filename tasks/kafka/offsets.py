"""Track which offsets may be committed: a record is done when the ledger has claimed or refused all its tasks.

Kafka stores one offset per partition, and everything before it counts as done. So a record that is done waits for the
records before it, and a crash delivers again at most the records that were in progress. Partitions that move to another
consumer are forgotten, since Kafka would refuse our commit for them.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterable


class Offsets:
    """The records of one consumer that are not done. Records of a partition arrive in order."""

    def __init__(self) -> None:
        self._pending: dict[int, deque[tuple[int, frozenset[uuid.UUID]]]] = {}

    def delivered(self, partition: int, offset: int, ids: Iterable[uuid.UUID]) -> None:
        """Add a record. A record without ids is done at once."""
        self._pending.setdefault(partition, deque()).append((offset, frozenset(ids)))

    def owned(self, left: Collection[uuid.UUID]) -> dict[int, int]:
        """Mark all tasks but `left` as claimed or refused. Return the offsets to commit, by partition."""
        unclaimed = frozenset(left)
        found = {}
        for partition, records in self._pending.items():
            while records and not records[0][1] & unclaimed:
                found[partition] = records.popleft()[0] + 1
        return found

    def waiting(self) -> list[uuid.UUID]:
        """Return the tasks of all records that are not done."""
        records = [ids for records in self._pending.values() for _, ids in records]
        return list(dict.fromkeys(one for ids in records for one in ids))

    def forget(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self._pending.pop(partition, None)
