"""Which consumers of streams are needed now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import settings
from models.engine import autocommit, engine
from receipts.errors import ReceiptLogUnreachable
from receipts.left_over_shards import stream_keys_in_use
from receipts.log_client import connected
from receipts.streams.consumers import all_shards
from receipts.switches import read_switches
from tasks.core.registry import handlers

ANSWER_SECONDS: Final = 2.0


def needed_consumers() -> Iterator[str]:
    """Return the names of the Celery tasks, without `receipts.`, that must run.

    Savers and deliverers are needed while two-phase receipts are on, and afterwards until the streams are empty. The
    ledger may know of no receipt although messages were accepted, if it was down before the setting was switched off.
    """
    with autocommit(engine()) as connection:
        switches = read_switches(connection)
    if switches.two_phase or has_entries(if_unknown=switches.was_two_phase):
        yield "save"
        yield "deliver"
    handlers()  # imports INGEST_HANDLERS, which may register consumers
    if any(all_shards()):
        yield "consume"


def has_entries(*, if_unknown: bool) -> bool:
    """Return whether a stream of the receipt log has entries, or `if_unknown` if Redis cannot be asked."""
    try:
        with connected(answer_seconds=ANSWER_SECONDS) as client:
            return any(client.xlen(key) for key in stream_keys_in_use(client))
    except (ReceiptLogUnreachable, settings.SettingsError):
        return if_unknown
