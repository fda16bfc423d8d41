"""What is counted. Each subject has results; `queue` and `type` are empty where they do not apply."""

from __future__ import annotations

from enum import StrEnum


class Subject(StrEnum):
    """The subject of a row of the tally."""

    TASK = "task"  # deliveries, by result; seconds in the handler, and seconds that the task waited until its claim
    PUBLISH = "publish"  # outbox events, by result; `queue` is the destination; seconds of a batch; waits of its events
    FLUSH = "flush"  # audits of the outbox, by code
    RECLAIM = "reclaim"  # tasks reclaimed from lost workers, and leases that could not be reclaimed
    LEASE = "lease"  # leases that expired, and tasks whose lease was lost
    DEAD_LETTER = "dead_letter"  # letters written to the dead-letter queue
