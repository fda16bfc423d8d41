"""The Celery task that consumes streams. Its queue `receipts` has a worker of its own, because it runs for long.

Beat sends it every few seconds. A message that finds no free shard ends at once, so each process of the worker holds at
most one shard, and `-c` of the worker is the number of shards that are consumed at the same time.
"""

from __future__ import annotations

import logging

from models.errors import Unreachable
from receipts.streams.consume import consume_any_shard
from tasks.celery import app
from tasks.core.tick_intervals import HOLD_SHARD_SECONDS

logger = logging.getLogger(__name__)


@app.task(name="receipts.consume")
def consume() -> None:
    """Consume a free shard for a limited time, then hand it over."""
    try:
        consume_any_shard(HOLD_SHARD_SECONDS)
    except Unreachable as error:
        logger.warning("The shard is consumed later: %s", error.message)
