"""The gauges of the streams, read from the receipt log when metrics are scraped."""

from __future__ import annotations

from typing import Final

import settings
from receipts import kinds
from receipts.errors import ReceiptLogUnreachable
from receipts.log_client import connected

ANSWER_SECONDS: Final = 1.0  # a scrape must not wait for long

Samples = list[tuple[tuple[str, ...], float]]


def read_streams() -> tuple[Samples, Samples]:
    """Return the length of every stream, and the pending entries of every group; nothing if Redis does not answer."""
    lengths: Samples = []
    pending: Samples = []
    try:
        with connected(answer_seconds=ANSWER_SECONDS) as client:
            for key in kinds.stream_keys():
                lengths.append(((key,), client.xlen(key)))
                for group in client.xinfo_groups(key) if client.exists(key) else ():
                    pending.append(((key, group["name"]), group["pending"]))
    except (ReceiptLogUnreachable, settings.SettingsError):
        return [], []
    return lengths, pending
