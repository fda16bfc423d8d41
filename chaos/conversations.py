"""Divide what a client and PostgreSQL or Redis say to each other into requests and replies.

So a proxy can recognise a statement, and knows when the server has executed it. Of the protocols, only what is needed
for that is understood. Encrypted connections are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, NamedTuple

# SSLRequest, GSSENCRequest and CancelRequest: the server answers the first two with one byte, and the client begins
# again; after the third it leaves.
CANCEL: Final = 80877102
ENCRYPTION: Final = {80877103, 80877104}
START: Final = b""  # the kind of a first message, which has none


class Message(NamedTuple):
    """A message of a client, and the statement that it makes the server execute."""

    sent: bytes
    statement: bytes | None


class Conversation(ABC):
    """What is said on one connection. `waiting` is the number of requests without a complete reply."""

    def __init__(self) -> None:
        self.waiting = 0
        self._asked = self._said = b""

    def ask(self, received: bytes) -> Iterator[Message]:
        """Yield the messages of the client that are complete now."""
        self._asked += received
        while found := self._first_message(self._asked):
            self._asked = self._asked[len(found.sent) :]
            yield found

    def answer(self, received: bytes) -> int:
        """Return how many replies of the server are complete now that were not before."""
        self._said += received
        count = 0
        while length := self._length_of_reply(self._said):
            count += self._ends_a_reply(self._said[:length])
            self._said = self._said[length:]
        self.waiting -= count
        return count

    @abstractmethod
    def _first_message(self, received: bytes) -> Message | None:
        """Return the first message, or None if it is not complete; count it in `waiting` if it will be answered."""

    @abstractmethod
    def _length_of_reply(self, received: bytes) -> int:
        """Return the length of the first message of the server, or 0 if it is not complete."""

    @abstractmethod
    def _ends_a_reply(self, message: bytes) -> bool: ...


class PostgresConversation(Conversation):
    """Simple queries, and the extended protocol: Parse names a statement, Bind a portal for it, Execute runs that.

    The reply to a query, or to the messages before a Sync, ends with ReadyForQuery.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_started = False
        self._asked_for_encryption = False
        self._statements: dict[bytes, bytes] = {}
        self._portals: dict[bytes, bytes] = {}

    def _first_message(self, received: bytes) -> Message | None:
        kind = received[:1] if self._has_started else START
        length = _length(received, len(kind))
        if not length:
            return None
        sent = received[:length]
        return Message(sent, self._statement(kind, sent[len(kind) + 4 :]))

    def _statement(self, kind: bytes, content: bytes) -> bytes | None:
        words = content.split(b"\0")
        match kind:
            case b"":
                code = int.from_bytes(content[:4], "big")
                self._asked_for_encryption = code in ENCRYPTION
                self._has_started = code not in ENCRYPTION | {CANCEL}
                self.waiting += self._has_started
            case b"Q":
                self.waiting += 1
                return words[0]
            case b"P":
                self._statements[words[0]] = words[1]
            case b"B":
                self._portals[words[0]] = self._statements.get(words[1], b"")
            case b"E":
                return self._portals.get(words[0])
            case b"S":
                self.waiting += 1
        return None

    def _length_of_reply(self, received: bytes) -> int:
        if self._asked_for_encryption and received:
            self._asked_for_encryption = False
            return 1
        return _length(received, 1)

    def _ends_a_reply(self, message: bytes) -> bool:
        return message.startswith(b"Z")


class RedisConversation(Conversation):
    """Commands as arrays of strings. A statement is the words of a command with a space between them."""

    def _first_message(self, received: bytes) -> Message | None:
        length, words = _redis_value(received, 0)
        if not length:
            return None
        self.waiting += 1
        return Message(received[:length], b" ".join(words))

    def _length_of_reply(self, received: bytes) -> int:
        return _redis_value(received, 0)[0]

    def _ends_a_reply(self, message: bytes) -> bool:
        return bool(message)


def _length(received: bytes, head: int) -> int:
    """Return the length of a message whose length follows after `head` bytes, or 0 if it is not complete."""
    length = head + int.from_bytes(received[head : head + 4], "big")
    return length if head + 4 <= length <= len(received) else 0


def _redis_value(received: bytes, start: int) -> tuple[int, list[bytes]]:
    """Return where the value ends that begins at `start`, 0 if it is not complete, and the strings in it."""
    end = received.find(b"\r\n", start) + 2
    if end < 2:
        return 0, []
    kind, line = received[start : start + 1], received[start + 1 : end - 2]
    if kind in (b"$", b"="):
        size = int(line)
        if size < 0:
            return end, []
        after = end + size + 2
        return (after, [received[end : end + size]]) if len(received) >= after else (0, [])
    words: list[bytes] = []
    if kind in (b"*", b"~", b">", b"%"):
        for _ in range(int(line) * (2 if kind == b"%" else 1)):
            end, more = _redis_value(received, end)
            if not end:
                return 0, []
            words += more
    return end, words
