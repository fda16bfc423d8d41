"""Drop entries whose original message was consumed before (SINK_DEDUP_ENABLED). This is an insurance, not a guarantee.

A producer that publishes a message again names the first one in `x-original-message-id`. The last ids of each shard are
remembered in Redis, from the acknowledgement of their entries on: an entry that was not acknowledged must not be
dropped. Sinks with keys recognise a repetition reliably, also one that is forgotten here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from receipts.streams.entries import Entry
from receipts.streams.source import StreamSource
from sinks.hash_tags import key_beside

REMEMBERED: Final = 10_000  # ids of each shard, about a megabyte


class Repeats:
    """The messages that a shard has consumed."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source
        self.key = key_beside(source.shard.key, f"consumed:{source.shard.group}")
        self._collected: set[str] = set()  # of entries that are not acknowledged yet

    def without(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that repeat no message."""
        ids = {entry.id: entry.original_message_id for entry in entries}
        known = self._known({message_id for message_id in ids.values() if message_id})
        left = []
        for entry in entries:
            message_id = ids[entry.id]
            if message_id is None or message_id not in known:
                left.append(entry)
            if message_id is not None:
                known.add(message_id)
                self._collected.add(message_id)
        return left

    def remember(self, entries: Sequence[Entry]) -> None:
        """Remember the messages of these entries, which have just been acknowledged."""
        if not self._collected:
            return
        if acknowledged := self._collected & {entry.original_message_id for entry in entries}:
            seconds, _ = self.source.ask("time")
            self.source.ask("zadd", self.key, dict.fromkeys(acknowledged, seconds))
            self.source.ask("zremrangebyrank", self.key, 0, -REMEMBERED - 1)
            self._collected -= acknowledged

    def _known(self, message_ids: set[str]) -> set[str]:
        asked = sorted(message_ids)
        scores = self.source.ask("zmscore", self.key, asked) if asked else []
        found = {id_ for id_, score in zip(asked, scores, strict=True) if score is not None}
        return found | (message_ids & self._collected)
