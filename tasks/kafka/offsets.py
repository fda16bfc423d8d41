"""Which offsets may be committed: a record is done when the ledger owns, or has refused, every task that it names.

Kafka knows one number for each partition, up to which all is done. So a record that is done waits for those before it,
and what is delivered again after a crash is at most what was in hand. A partition that was taken away is forgotten: its
records are somebody else's, and to commit for it would be refused.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterable


class Offsets:
    """Of one consumer. Records are delivered in the order of their partition."""

    def __init__(self) -> None:
        self._in_hand: dict[int, deque[tuple[int, frozenset[uuid.UUID]]]] = {}

    def delivered(self, partition: int, offset: int, ids: Iterable[uuid.UUID]) -> None:
        """No ids: a record that names nobody, which is done at once."""
        self._in_hand.setdefault(partition, deque()).append((offset, frozenset(ids)))

    def owned(self, left: Collection[uuid.UUID]) -> dict[int, int]:
        """Everything in hand but these ids is the ledger's. Returns what to commit: the next offset by partition."""
        still_ours = frozenset(left)
        found = {}
        for partition, records in self._in_hand.items():
            while records and not records[0][1] & still_ours:
                found[partition] = records.popleft()[0] + 1
        return found

    def waiting(self) -> list[uuid.UUID]:
        """The tasks of records that are not done."""
        records = [ids for records in self._in_hand.values() for _, ids in records]
        return list(dict.fromkeys(one for ids in records for one in ids))

    def forget(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self._in_hand.pop(partition, None)
