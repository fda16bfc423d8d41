"""Adding events, in the caller's own transaction: they exist if it commits, and never if it does not.

An event is born leased to the process that adds it (P18): right after the commit that process publishes it and acks it,
from a thread of its own. If it dies in between, the short lease runs out and a relay takes over. Born without a lease,
and left to the relay, is an event that is due later, one with an `ordering_key` (P20), one whose destination does not
answer, and one that is added through a connection whose commit nobody watches: use `outbox.begin(engine)` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from models.sql import sql
from outbox import after_commit
from outbox.after_commit_publisher import submitter
from outbox.canonical import canonical_json, payload_sha
from outbox.destinations import is_wakeup
from outbox.lease import ClaimedEvent, Db, connection_of

CHUNK: Final = 1000

# born: → NEW, leased to the submitter where a token is given; created now, by the ledger's clock.
BORN: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    INSERT INTO ledger.outbox_event (destination, payload, payload_sha, dedup_key, headers, ordering_key, next_retry_at,
                              created_at, locked_by, locked_at, lease_token, lease_until)
    SELECT destination, CAST(payload AS jsonb), payload_sha, dedup_key, CAST(headers AS jsonb), ordering_key, due_at,
           clock.at,
           CASE WHEN leased THEN :worker_id END, CASE WHEN leased THEN clock.at END,
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

# in_turn: the locks that the table's trigger takes for ordered keys (P20), all of them before the first row and in one
# order, so that two bulk adds with the same keys never wait for each other.
IN_TURN: Final = sql("""
    SELECT pg_advisory_xact_lock(key) FROM (
        SELECT DISTINCT hashtextextended(destination || chr(31) || ordering_key, 0) AS key
        FROM unnest(CAST(:destination AS text[]), CAST(:ordering_key AS text[])) AS given(destination, ordering_key)
        WHERE ordering_key IS NOT NULL ORDER BY key) AS keys
""")


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to be added."""

    destination: str
    payload: Any
    headers: Mapping[str, Any] = field(default_factory=dict)
    ordering_key: str | None = None
    due_at: datetime | None = None
    dedup_key: str | None = None


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
    """Add one event and return its id. Where a destination looks for duplicates, `dedup_key` replaces the payload."""
    return add_many(db, [NewEvent(destination, payload, headers or {}, ordering_key, due_at, dedup_key)])[0]


def add_many(db: Db, events: Iterable[NewEvent]) -> list[int]:
    """Add events, a thousand in one round trip, and return their ids in the same order. All are checked first."""
    written = [(event, canonical_json(event.payload), canonical_json(dict(event.headers))) for event in events]
    ids: list[int] = []
    for chunk in _chunks(written):
        ids += _add_chunk(db, chunk)
    return ids


Written = tuple[NewEvent, str, str]


def _add_chunk(db: Db, chunk: Sequence[Written]) -> list[int]:
    connection = connection_of(db)
    ours = submitter()
    watched = after_commit.is_watched(db)
    leased = [watched and _is_express(event) and ours.accepts(event.destination) for event, _, _ in chunk]
    values = {
        "destination": [event.destination for event, _, _ in chunk],
        "payload": [payload for _, payload, _ in chunk],
        "payload_sha": [None if is_wakeup(event.destination) else payload_sha(payload) for event, payload, _ in chunk],
        "dedup_key": [event.dedup_key for event, _, _ in chunk],
        "headers": [headers for _, _, headers in chunk],
        "ordering_key": [event.ordering_key for event, _, _ in chunk],
        "due_at": [event.due_at for event, _, _ in chunk],
        "leased": leased,
        "worker_id": ours.worker_id,
        "lease_token": ours.lease_token,
        "lease_seconds": ours.lease_seconds,
    }
    if any(event.ordering_key is not None for event, _, _ in chunk):
        connection.execute(IN_TURN, values)
    rows = sorted((row.id, row.created_at) for row in connection.execute(BORN, values))
    born = [
        ClaimedEvent(
            id_, event.destination, event.payload, None, event.headers, 0, ours.lease_token, waiting_since=created_at
        )
        for (id_, created_at), (event, _, _), is_leased in zip(rows, chunk, leased, strict=True)
        if is_leased
    ]
    if born:
        after_commit.publish_after_commit(db, born)
    return [id_ for id_, _ in rows]


def _is_express(event: NewEvent) -> bool:
    return event.ordering_key is None and event.due_at is None


def _chunks(written: Sequence[Written]) -> Iterable[Sequence[Written]]:
    return (written[start : start + CHUNK] for start in range(0, len(written), CHUNK))
