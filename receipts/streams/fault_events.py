"""One structured log event for each fault of a stream consumer. LOG_FORMAT=json shows the fields."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any, Final

from receipts.streams.consumers import Shard

logger = logging.getLogger(__name__)


class FaultEvent(StrEnum):
    """What happened. The window of the fault is in the comment."""

    CHECKPOINT_ABORTED = "checkpoint_aborted"  # before the row of the checkpoint: the entries are read again
    CHECKPOINT_NOT_COMMITTED = "checkpoint_not_committed"  # between the row and the commit of the last sink
    CHECKPOINT_RESTORED = "checkpoint_restored"  # the next consumer has committed such a checkpoint
    ACKNOWLEDGED_LATE = "entries_acknowledged_late"  # between the mark `sink_committed` and XACK
    SHARD_LOST = "shard_lost"  # another consumer has taken the shard over
    SHARD_NOT_RELEASED = "shard_not_released"  # the ledger did not answer
    ENTRIES_CLAIMED = "entries_claimed"  # after the read, by a consumer that is gone
    ENTRIES_TRIMMED = "entries_trimmed"  # deleted from the stream before they were acknowledged: their effect is lost
    HANDLER_LATE = "handler_late"  # the handler kept the checkpoint waiting for longer than CHECKPOINT_DRAIN_MS
    REPEATS_DROPPED = "repeats_dropped"  # entries whose original message was consumed before


_LEVELS: Final = {
    FaultEvent.ENTRIES_TRIMMED: logging.ERROR,
    FaultEvent.CHECKPOINT_NOT_COMMITTED: logging.ERROR,
    FaultEvent.REPEATS_DROPPED: logging.INFO,
}


def log_event(event: FaultEvent, message: str, shard: Shard, **fields: Any) -> None:
    """Log a sentence and, for programs, the event with its stream, shard, holder and other fields."""
    named = {"event": event.value, "stream": shard.stream, "shard": shard.number, "holder": shard.holder, **fields}
    level = _LEVELS.get(event, logging.WARNING)
    logger.log(level, "%s [%s, shard %d]", message, shard.stream, shard.number, extra=named)
