"""The kinds of messages that get receipts, each with a stream of its own, and the keys of the receipt log.

The stream of a kind has one shard by default, with the name of the stream; RECEIPT_SHARDS makes it `name:0`, `name:1`,
and so on. A sender always uses the same shard, so its messages stay in order. The receipt log is one Redis server: one
script writes the claim of a message and its entry, and their keys are on the same server.
"""

from __future__ import annotations

import hashlib
import importlib
import uuid
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

from sqlalchemy.orm import Session

import settings
from receipts.rows import Row
from receipts.save_results import SaveResult
from receipts.streams.entries import Entry
from tasks.core.task_ids import fresh_id, keyed_id

CHAT: Final = "chat"
TASKS: Final = "tasks"
WORKFLOWS: Final = "workflows"
DOCUMENTS: Final = "documents"
# The module that reads and saves the entries of a kind: a `Saver`. Documents build on this package, so they are named.
SAVERS: Final = {
    CHAT: "receipts.chat_messages",
    TASKS: "receipts.task_messages",
    WORKFLOWS: "receipts.task_messages",
    DOCUMENTS: "documents.accepted",
}


class Saver(Protocol):
    """What the module of a kind has."""

    def row_of(self, kind: str, entry: Entry) -> Row:
        """Return what the receipt of an entry says; raise ValueError or KeyError if it is not an entry of ours."""

    def read(self, kind: str, entries: Sequence[Entry]) -> Sequence[Any]:
        """Return what each entry says, with its row as `row`. An error concerns one of them. No server is asked."""

    def prepare(self, given: Sequence[Any]) -> Any:
        """Return what `save` needs and can be computed before its transaction. No server is asked."""

    def save(self, db: Session, given: Sequence[Any], prepared: Any) -> list[SaveResult]:
        """Write what `read` returned, and the receipts, into the ledger. An error concerns all of them."""


@cache
def saver_of(kind: str) -> Saver:
    return cast("Saver", importlib.import_module(SAVERS[kind]))


def message_id(kind: str, principal: str, client_id: str | None) -> uuid.UUID:
    """Return the id of a message: the same for every repetition of the client's id, otherwise a new one."""
    return fresh_id() if client_id is None else keyed_id(kind, f"{principal}:{client_id}")


def accepted_stream(kind: str) -> str:
    """Return the name of the stream that `accept` writes to."""
    current = settings.current()
    return current.receipt_stream_accepted if kind == CHAT else f"{current.ledger_schema}:stream:{kind}:accepted"


def shard_of(sender: str) -> int:
    """Return the shard of a sender. All processes must have the same RECEIPT_SHARDS."""
    digest = hashlib.sha256(sender.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % settings.current().receipt_shards


def shard_key(stream: str, number: int, shards: int | None = None) -> str:
    """Return the key of a shard in Redis. `shards`: of how many; None: RECEIPT_SHARDS."""
    return stream if (shards or settings.current().receipt_shards) == 1 else f"{stream}:{number}"


def streams() -> Iterator[str]:
    """Return the name of every stream of the receipt log."""
    yield from map(accepted_stream, SAVERS)
    yield settings.current().receipt_stream_to_save


def stream_keys() -> Iterator[str]:
    """Return the key of every shard of every stream, as RECEIPT_SHARDS says. See also `left_over_shards.py`."""
    for stream in streams():
        for number in range(settings.current().receipt_shards):
            yield shard_key(stream, number)


def claim_key(id_: uuid.UUID | str) -> str:
    """Return the key of the claim on a message: which payload has this id, and how far it is."""
    return f"{settings.current().ledger_schema}:receipt:{id_}"


def switches_key() -> str:
    """Return the key of the switches as the scripts read them."""
    return f"{settings.current().ledger_schema}:receipt-switches"


def group_of(name: str) -> str:
    """Return a consumer group of this installation."""
    return settings.current().broker_queue(name)
