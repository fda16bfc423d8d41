"""Shards that have entries although RECEIPT_SHARDS does not name them: it was changed before they were saved.

Savers and deliverers consume them, too, until they are empty. Nothing is lost; but the messages of a sender may be in
two shards then, so those from before and after the change may be saved in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import settings
from receipts import kinds, lua

MOST_SHARDS: Final = 256  # the largest value of RECEIPT_SHARDS


@dataclass(frozen=True, slots=True, order=True)
class LeftOver:
    """A shard with entries. `shards` is 1 if its stream had only one; otherwise the exact number is unknown."""

    stream: str
    number: int
    shards: int

    @property
    def key(self) -> str:
        return kinds.shard_key(self.stream, self.number, self.shards)


def left_over_shards(client: Any) -> list[LeftOver]:
    """Ask Redis for all shards that are left over."""
    streams = list(kinds.streams())
    found = client.eval(lua.LEFT_OVER, 0, settings.current().receipt_shards, MOST_SHARDS, *streams)
    places = zip(found[::2], found[1::2], strict=True)
    return [LeftOver(streams[at - 1], max(number, 0), 1 if number < 0 else MOST_SHARDS) for at, number in places]


def stream_keys_in_use(client: Any) -> Iterator[str]:
    """Return the keys of the shards that RECEIPT_SHARDS names, and of those that are left over."""
    yield from kinds.stream_keys()
    for shard in left_over_shards(client):
        yield shard.key
