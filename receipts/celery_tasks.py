"""The Celery tasks that consume streams. Their queue `receipts` has a worker of its own, because they run for long.

    receipts.tick       on the queue `system`, sent by beat every few seconds: sends the others, if there is work
    receipts.save       saves accepted messages (`save.py`)
    receipts.deliver    delivers chat messages before they are saved (`deliver.py`)
    receipts.consume    runs your own consumers (`streams/consumers.py`)

One that finds no free shard ends at once. One that has held a shard sends the next message itself, so that the shard is
not without a consumer until the next tick. Each process of the worker runs one of them, so `-c` must be at least
RECEIPT_SHARDS, twice that with deliver-before-saved, and more for your own consumers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from models.ledger_outage import is_outage, skipped_in_outage
from receipts.deliver import deliver_any_shard
from receipts.needed_consumers import needed_consumers
from receipts.save import save_any_shard
from receipts.streams.consume import consume_any_shard
from tasks.celery import app
from tasks.core.tick_intervals import CONSUME_SECONDS, HOLD_SHARD_SECONDS

logger = logging.getLogger(__name__)


@app.task(name="receipts.tick")
def tick() -> None:
    """Start the consumers that are needed, if they do not run."""
    with skipped_in_outage():
        for name in needed_consumers():
            app.send_task(f"receipts.{name}", expires=CONSUME_SECONDS, ignore_result=True)


@app.task(name="receipts.save", bind=True)
def save(self: Any) -> None:
    """Save accepted messages of a free shard for a limited time, then hand it over."""
    _hold(self, save_any_shard)


@app.task(name="receipts.deliver", bind=True)
def deliver(self: Any) -> None:
    """Deliver accepted messages of a free shard for a limited time, then hand it over."""
    _hold(self, deliver_any_shard)


@app.task(name="receipts.consume", bind=True)
def consume(self: Any) -> None:
    """Run one of your own consumers on a free shard for a limited time, then hand it over."""
    _hold(self, consume_any_shard)


def _hold(task: Any, run: Callable[[float], bool]) -> None:
    try:
        held = run(HOLD_SHARD_SECONDS)
    except Exception as error:
        if not is_outage(error):
            raise
        logger.warning(
            "The shard is consumed later: %s", str(error).partition("\n")[0], extra={"event": "shard_delayed"}
        )
        return
    if held:
        task.apply_async(expires=CONSUME_SECONDS, ignore_result=True)
