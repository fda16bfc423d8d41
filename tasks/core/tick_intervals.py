"""How often each tick is run, by beat or by a worker in its place."""

from __future__ import annotations

from typing import Final

import settings

BEAT_SEEN_SECONDS: Final = 5.0  # `manage.py check` calls beat late after four of these
PRUNE_SECONDS: Final = 60.0  # small steps, often: never one long DELETE


def intervals() -> dict[str, float]:
    current = settings.current()
    return {
        "relay": current.outbox_publish_interval_ms / 1000,
        "reclaim": current.ingest_reclaim_interval_ms / 1000,
        "prune": PRUNE_SECONDS,
    }
