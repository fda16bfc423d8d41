"""Numbered chat messages of several senders, and how often a later one came before an earlier one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from models.engine import engine
from models.sql import sql
from receipts import frames
from receipts.chat_messages import ChatMessage
from tests.receipts.saving import connect

RECEIVER = "receiver"
IN_LEDGER = sql("SELECT principal, client_id FROM ledger.receipt WHERE level = 'saved' AND kind = 'chat' ORDER BY seq")


def numbered(sender: str, n: int) -> ChatMessage:
    return ChatMessage(sender, RECEIVER, str(n), f"text {n} of {sender}")


def inversions(found: Iterable[tuple[str, int]]) -> int:
    """Return how many messages come right after a later one of the same sender. A repetition does not count."""
    by_sender: dict[str, list[int]] = defaultdict(list)
    for sender, n in dict.fromkeys(found):
        by_sender[sender].append(n)
    return sum(one > next_ for numbers in by_sender.values() for one, next_ in pairwise(numbers))


def in_ledger() -> list[tuple[str, int]]:
    """Return the saved messages in the order of their receipts."""
    with engine().connect() as connection:
        return [(sender, int(n)) for sender, n in connection.execute(IN_LEDGER)]


class Published:
    """The frames that were published for a user since this was made."""

    def __init__(self, pubsub: Any) -> None:
        self.pubsub = pubsub

    def messages(self) -> list[tuple[str, int]]:
        """Return the messages that were published, with repetitions."""
        found = []
        while (frame := self.pubsub.get_message(timeout=0.05)) is not None:
            if frame["type"] == "message":
                shown = json.loads(frame["data"])
                assert shown["type"] == frames.SINGLE_CHAT
                found.append((shown["from"], int(shown["clientMsgId"])))
        return found


@contextmanager
def published(user: str = RECEIVER) -> Iterator[Published]:
    """Subscribe to the frames of a user."""
    with connect() as client, client.pubsub() as pubsub:
        pubsub.subscribe(frames.channel_of(user))
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        yield Published(pubsub)
