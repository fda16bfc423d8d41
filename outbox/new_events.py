"""Add events in the caller's own transaction: they exist exactly if it commits.

An event is leased at insert to the process that adds it. Right after the commit a thread of this process publishes the
event and acks it. If the process dies in between, the short lease expires and a relay publishes the event. The relay
also publishes every event that is not leased at insert: one that is due later, one with an `ordering_key`, one whose
destination is unreachable, and one that is added through a plain connection: use `outbox.begin(engine)` to avoid that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from models.sql import sql
from outbox import after_commit
from outbox.after_commit_publisher import after_commit_publisher
from outbox.canonical_json import canonical_json, payload_sha
from outbox.destinations import is_wakeup
from outbox.lease import ClaimedEvent, Db, connection_of

CHUNK: Final = 1000

# insert: → NEW, leased at insert where `leased` is true.
INSERT: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    INSERT INTO ledger.outbox_event (destination, payload, payload_sha, dedup_key, headers, ordering_key, next_retry_at,
                                     created_at, locked_by, locked_at, lease_token, lease_until)
    SELECT destination, CAST(payload AS jsonb), payload_sha, dedup_key, CAST(headers AS jsonb), ordering_key, due_at,
           clock.at, CASE WHEN leased THEN :worker_id END, CASE WHEN leased THEN clock.at END,
           CASE WHEN leased THEN CAST(:lease_token AS uuid) END,
           CASE WHEN leased THEN clock.at + make_interval(secs => :lease_seconds) END
    FROM unnest(CAST(:destination AS text[]), CAST(:payload AS text[]), CAST(:payload_sha AS text[]),
                CAST(:dedup_key AS text[]), CAST(:headers AS text[]), CAST(:ordering_key AS text[]),
                CAST(:due_at AS timestamptz[]), CAST(:leased AS boolean[]))
         WITH ORDINALITY AS given(destination, payload, payload_sha, dedup_key, headers, ordering_key, due_at, leased,
                                  place), clock
    ORDER BY place
    RETURNING id, created_at
""")

# Take the locks that the table's trigger takes for ordered keys, in one order and before the first row, so that two
# bulk adds with the same keys do not deadlock. The lock key must be the trigger's:
# models/migrations/versions/0001_ledger.sql.
LOCK_KEYS: Final = sql("""
    SELECT pg_advisory_xact_lock(key) FROM (
        SELECT DISTINCT hashtextextended(destination || chr(31) || ordering_key,
                                         CAST(CAST('ledger.outbox_event' AS regclass) AS bigint)) AS key
        FROM unnest(CAST(:destinations AS text[]), CAST(:keys AS text[])) AS given(destination, ordering_key)
        ORDER BY key) AS keys
""")


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to add."""

    destination: str
    payload: Any
    headers: Mapping[str, Any] = field(default_factory=dict)
    ordering_key: str | None = None
    due_at: datetime | None = None
    dedup_key: str | None = None


Written = tuple[NewEvent, str, str]  # with its payload and headers as JSON


def add(
    db: Db,
    destination: str,
    payload: Any,
    *,
    headers: Mapping[str, Any] | None = None,
    ordering_key: str | None = None,
    due_at: datetime | None = None,
    dedup_key: str | None = None,
) -> int:
    """Add one event and return its id. At a destination with `dedup=1`, `dedup_key` replaces the payload's hash."""
    return add_many(db, [NewEvent(destination, payload, headers or {}, ordering_key, due_at, dedup_key)])[0]


def add_many(db: Db, events: Iterable[NewEvent]) -> list[int]:
    """Add events, a thousand per round trip, and return their ids in the same order. All are checked first."""
    written = [(event, canonical_json(event.payload), canonical_json(dict(event.headers))) for event in events]
    if ordered := [event for event, _, _ in written if event.ordering_key is not None]:
        keys = [event.ordering_key for event in ordered]
        connection_of(db).execute(LOCK_KEYS, {"destinations": [event.destination for event in ordered], "keys": keys})
    chunks = (written[start : start + CHUNK] for start in range(0, len(written), CHUNK))
    return [id_ for chunk in chunks for id_ in _add_chunk(db, chunk)]


def _add_chunk(db: Db, chunk: Sequence[Written]) -> list[int]:
    ours = after_commit_publisher()
    events = [event for event, _, _ in chunk]
    watched = after_commit.is_watched(db)
    leased = [
        watched and event.ordering_key is None and event.due_at is None and ours.accepts(event.destination)
        for event in events
    ]
    values = {
        "destination": [event.destination for event in events],
        "payload": [payload for _, payload, _ in chunk],
        "payload_sha": [None if is_wakeup(event.destination) else payload_sha(payload) for event, payload, _ in chunk],
        "dedup_key": [event.dedup_key for event in events],
        "headers": [headers for _, _, headers in chunk],
        "ordering_key": [event.ordering_key for event in events],
        "due_at": [event.due_at for event in events],
        "leased": leased,
        "worker_id": ours.worker_id,
        "lease_token": ours.lease_token,
        "lease_seconds": ours.lease_seconds,
    }
    rows = sorted((row.id, row.created_at) for row in connection_of(db).execute(INSERT, values))
    to_publish = [
        ClaimedEvent(id_, event.destination, event.payload, None, event.headers, 0, ours.lease_token, created_at)
        for (id_, created_at), event, is_leased in zip(rows, events, leased, strict=True)
        if is_leased
    ]
    if to_publish:
        after_commit.publish_after_commit(db, to_publish)
    return [id_ for id_, _ in rows]
