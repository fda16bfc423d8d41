"""The gauges of the streams, read from the receipt log when metrics are scraped."""

from __future__ import annotations

from typing import Final

import settings
from receipts.errors import ReceiptLogUnreachable
from receipts.left_over_shards import stream_keys_in_use
from receipts.log_client import connected

ANSWER_SECONDS: Final = 1.0  # a scrape must not wait for long

Samples = list[tuple[tuple[str, ...], float]]


def read_streams() -> tuple[Samples, Samples]:
    """Return the length of every stream, and the pending entries of every group; nothing if Redis does not answer."""
    lengths: Samples = []
    pending: Samples = []
    try:
        with connected(answer_seconds=ANSWER_SECONDS) as client:
            keys = list(stream_keys_in_use(client))
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.xlen(key).exists(key)
            answers = pipeline.execute()
            lengths += [((key,), length) for key, length in zip(keys, answers[::2], strict=True)]
            existing = [key for key, exists in zip(keys, answers[1::2], strict=True) if exists]
            for key in existing:
                pipeline.xinfo_groups(key)
            for key, groups in zip(existing, pipeline.execute(), strict=True):
                pending += [((key, group["name"]), group["pending"]) for group in groups]
    except (ReceiptLogUnreachable, settings.SettingsError):
        return [], []
    return lengths, pending
