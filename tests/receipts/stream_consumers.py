"""A consumer for tests with real workers, which import this module because INGEST_HANDLERS names it."""

from __future__ import annotations

from receipts.streams.consumers import StreamConsumer, register
from receipts.streams.entries import Batch
from tests.receipts.consuming import GROUP
from tests.receipts.places import STREAM

LIST = "effects"


def append(batch: Batch) -> None:
    for entry in batch.entries:
        batch.sink("place").append(entry, LIST, int(entry.fields["n"]))


register(StreamConsumer(GROUP, STREAM, append, sinks=("place",)))
