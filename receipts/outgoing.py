"""Frames on their way to one client: a queue with limits, so that a slow client cannot use up the memory.

A frame stays in the queue until it was handed to the server. What a client has missed is added only while there is
room. Frames that are pushed cannot wait: if the queue is full, the connection is closed (`api/chat_connection.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from receipts import frames

MOST_FRAMES: Final = 1000
MOST_BYTES: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class OutFrame:
    """A frame as text. `key` is the same for repetitions; a frame without one is never dropped as a repetition."""

    text: str
    size: int
    server_msg_id: str | None
    key: str | None

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> OutFrame:
        """Return the frame as a client gets it, with a signed receipt."""
        shown = frames.sign_receipt(frame)
        written = frames.encode(shown).encode(errors="replace")
        id_, is_saved = shown["serverMsgId"], shown["ackType"] == frames.SAVED
        key = f"{shown['type']} {id_}" if shown["type"] == frames.SINGLE_CHAT or is_saved else None
        return cls(written.decode(), len(written), id_, key)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A frame in the queue; `began_at` is when the message arrived that it answers, if it is its first receipt."""

    frame: OutFrame
    began_at: float | None = None


class Outgoing:
    """The queue of one connection."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0
        self._added = asyncio.Event()
        self._removed = asyncio.Event()

    def has_room_for(self, frame: OutFrame) -> bool:
        """Return True if the frame may be added. An empty queue has room for every frame."""
        return not self._waiting or (len(self._waiting) < MOST_FRAMES and self._bytes + frame.size <= MOST_BYTES)

    def add(self, frame: OutFrame, began_at: float | None = None) -> None:
        self._waiting.append(Waiting(frame, began_at))
        self._bytes += frame.size
        self._added.set()

    async def wait_for_room(self, frame: OutFrame) -> None:
        while not self.has_room_for(frame):
            self._removed.clear()
            await self._removed.wait()

    async def wait_until_empty(self) -> None:
        while self._waiting:
            self._removed.clear()
            await self._removed.wait()

    async def first(self) -> Waiting:
        """Return the oldest frame as soon as there is one. It stays in the queue until `remove_first`."""
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        return self._waiting[0]

    def take_all(self) -> list[OutFrame]:
        """Empty the queue, and return what was in it."""
        found = [each.frame for each in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        self._removed.set()
        return found

    def remove_first(self) -> None:
        self._bytes -= self._waiting.popleft().frame.size
        self._removed.set()
