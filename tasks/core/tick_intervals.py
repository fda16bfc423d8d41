"""How often each tick runs, whether beat starts it or a worker does while beat is silent."""

from __future__ import annotations

from typing import Final

import settings

BEAT_SEEN_SECONDS: Final = 5.0  # `manage.py check` reports beat as late after four of these
PRUNE_SECONDS: Final = 60.0  # often, so that no single DELETE is long


def intervals() -> dict[str, float]:
    """Return the seconds between two runs, by the name of the tick."""
    current = settings.current()
    return {
        "relay": current.outbox_publish_interval_ms / 1000,
        "reclaim": current.ingest_reclaim_interval_ms / 1000,
        "prune": PRUNE_SECONDS,
    }
