"""How often each tick runs, whether beat starts it or a worker does while beat is silent."""

from __future__ import annotations

from typing import Final

import settings

BEAT_SEEN_SECONDS: Final = 5.0  # `manage.py check` reports beat as late after four of these
TALLY_SECONDS: Final = 5.0  # histograms and history are that much behind
PRUNE_SECONDS: Final = 60.0  # often, so that no single DELETE is long
SCHEDULES_SECONDS: Final = 1.0  # how late an occurrence of a schedule may be
CONSUME_SECONDS: Final = 5.0  # between two messages that let a worker consume a free shard of a stream
HOLD_SHARD_SECONDS: Final = 30.0  # how long it consumes; a message is then waiting, so the next consumer starts at once


def intervals() -> dict[str, float]:
    """Return the seconds between two runs, by the name of the tick."""
    current = settings.current()
    return {
        "relay": current.outbox_publish_interval_ms / 1000,
        "reclaim": current.ingest_reclaim_interval_ms / 1000,
        "tally": TALLY_SECONDS,
        "prune": PRUNE_SECONDS,
        "schedules": SCHEDULES_SECONDS,
    }
