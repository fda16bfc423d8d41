"""The lease protocol of the outbox.

The last `lease_token` written to a row decides who may write it; the database's clock (`ledger_now()`) decides when
another worker may reclaim it. A holder whose lease has expired may still finish a row that was not reclaimed. A holder
whose row was reclaimed may not, even if the same worker reclaimed it.

    NEW ──claim──► NEW, leased ──ack_sent──────────► SENT
     ▲                 │  │  └──mark_dead_by_worker─► DEAD
     └─release_lease───┘  └─────fail_retry──────────► RETRYING ──claim──► RETRYING, leased ─► …

An event can be claimed if it is NEW or RETRYING, due (`next_retry_at` is NULL or has passed) and has no live lease. A
claim is committed before it returns, so no transaction is open while the event is published. Every later statement
names the holder and the token. If it changes no row, the lease is lost: the caller audits `outbox_flush_conflict`,
drops the event and writes nothing.

Each function has a batch form: one statement that locks its rows in the order of their ids and returns the ids that it
changed. Only `claim_outbox` commits; the others leave that to the caller. Without a token (`lease_token=None`) the
holder's name and an unexpired lease decide; see docs/protocol.md, The lease functions. A program that knows only
`locked_by` and `locked_at` may take part: its lock holds off a claim for the lease of the worker that claims.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, TextClause
from sqlalchemy.orm import Session

from models.driver_values import storable
from models.errors import Misuse
from outbox.lease_statements import (
    ACK,
    ACK_AND_AUDIT,
    ACK_AND_AUDIT_BATCH,
    CLAIM_ANY,
    CLAIM_GIVEN,
    DEAD,
    DEDUP,
    RELEASE,
    RENEW,
    RETRY,
)

Db = Session | Connection
Token = uuid.UUID | None
LAST_ERROR_LIMIT: Final = 4000


@dataclass(frozen=True, slots=True)
class ClaimedEvent:
    """An event to publish, and the token that every later statement must name."""

    id: int
    destination: str
    payload: Any
    payload_sha: str | None
    headers: Mapping[str, Any]
    attempt_count: int
    lease_token: uuid.UUID
    waiting_since: datetime
    next_retry_at: datetime | None = None
    dedup_key: str | None = None
    ordering_key: str | None = None

    @property
    def sameness(self) -> str | None:
        """Return what identifies the message: events of one destination that share it are duplicates."""
        return self.dedup_key or self.payload_sha


@dataclass(frozen=True, slots=True)
class Floor:
    """How far a caller has read each of the three index ranges of a destination.

    A claim above the floor skips the dead index entries of events that were just sent. Use a floor for a short time
    only: ids do not become visible in their order, and ordering keys come back.
    """

    fresh_id: int = 0
    scheduled: tuple[datetime, int] = (datetime.min.replace(tzinfo=UTC), 0)
    key: str = ""  # inclusive

    @property
    def values(self) -> dict[str, Any]:
        """Return the parameters of the claim. Fresh events sort as due at -infinity, below any scheduled time."""
        at, id_ = self.scheduled
        return {"fresh_id": self.fresh_id, "scheduled_at": at, "scheduled_id": id_, "key": self.key}

    def above(self, events: Collection[ClaimedEvent]) -> Floor:
        """Return the floor after these events were claimed."""
        fresh, scheduled, keys = [self.fresh_id], [self.scheduled], [self.key]
        for event in events:
            if event.ordering_key is not None:
                keys.append(event.ordering_key + "\x01")  # the next possible text: PostgreSQL stores no NUL
            elif event.next_retry_at is None:
                fresh.append(event.id)
            else:
                scheduled.append((event.next_retry_at, event.id))
        return Floor(max(fresh), max(scheduled), max(keys))


NO_FLOOR: Final = Floor()


@dataclass(frozen=True, slots=True)
class SentDuplicate:
    """An earlier event with the same payload that was sent to the same destination."""

    id: int
    external_id: str | None
    sent_at: datetime


def claim_outbox(
    db: Db,
    worker_id: str,
    limit: int = 10,
    lease_seconds: float = 60,
    *,
    only: str | None = None,
    after: Floor = NO_FLOOR,
) -> list[ClaimedEvent]:
    """Lease up to `limit` due events, those that have waited longest first, and commit.

    All events of one claim share a fresh token. Of the events with one `ordering_key`, only the first that is not SENT
    can be claimed. `only` names a destination; `after` needs it.
    """
    connection = _idle_connection(db)
    values = {"worker_id": worker_id, "limit": limit, "lease_seconds": lease_seconds, "lease_token": uuid.uuid4()}
    values |= {"only": only, **after.values}
    rows = connection.execute(CLAIM_ANY if only is None else CLAIM_GIVEN, values).all()
    db.commit()
    return sorted((ClaimedEvent(*row) for row in rows), key=lambda event: (event.waiting_since, event.id))


def ack_sent(
    db: Db, outbox_id: int, worker_id: str, external_id: str | None = None, *, lease_token: Token = None
) -> bool:
    """Mark an event as SENT. Return False if the lease is lost."""
    return bool(ack_sent_many(db, {outbox_id: external_id}, worker_id, lease_token=lease_token))


def ack_sent_many(
    db: Db, external_ids: Mapping[int, str | None], worker_id: str, *, lease_token: Token = None
) -> set[int]:
    """Mark events as SENT, each with its external id or None."""
    return _execute(db, ACK, worker_id, lease_token, external_ids, external_id=_storable(external_ids))


def ack_sent_audited(
    db: Db, external_ids: Mapping[int, str | None], worker_id: str, *, lease_token: Token = None, as_batch: bool = False
) -> tuple[set[int], datetime | None]:
    """Mark events as SENT and audit them in the same statement. Return the ids that were still held, and `sent_at`.

    `as_batch` writes one audit row for all events instead of one for each. Its time is their `sent_at`.
    """
    values = {"id": list(external_ids), "external_id": _storable(external_ids)}
    values |= {"worker_id": worker_id, "lease_token": lease_token}
    ids, sent_at = connection_of(db).execute(ACK_AND_AUDIT_BATCH if as_batch else ACK_AND_AUDIT, values).one()
    return set(ids), sent_at


def fail_retry(
    db: Db, outbox_id: int, worker_id: str, error: str, next_attempt_at: datetime | str, *, lease_token: Token = None
) -> bool:
    """Mark an event as RETRYING, due at a time that the caller computed. Return False if the lease is lost.

    The time may be text in the form of ISO 8601. Either way it needs a time zone.
    """
    return bool(fail_retry_many(db, {outbox_id: (error, next_attempt_at)}, worker_id, lease_token=lease_token))


def fail_retry_many(
    db: Db, failures: Mapping[int, tuple[str, datetime | str]], worker_id: str, *, lease_token: Token = None
) -> set[int]:
    """Mark events as RETRYING, each with its error and the time of its next attempt."""
    errors = [_tail(error) for error, _ in failures.values()]
    times = [_time(at) for _, at in failures.values()]
    return _execute(db, RETRY, worker_id, lease_token, failures, error=errors, next_attempt_at=times)


def mark_dead_by_worker(db: Db, outbox_id: int, worker_id: str, error: str, *, lease_token: Token = None) -> bool:
    """Mark an event as DEAD and count the failure, so that an exhausted event has attempt_count = max_attempts."""
    return bool(mark_dead_many(db, {outbox_id: error}, worker_id, lease_token=lease_token))


def mark_dead_many(db: Db, errors: Mapping[int, str], worker_id: str, *, lease_token: Token = None) -> set[int]:
    """Mark events as DEAD, each with its error."""
    return _execute(db, DEAD, worker_id, lease_token, errors, error=list(map(_tail, errors.values())))


def renew_lease(db: Db, outbox_id: int, worker_id: str, *, lease_token: Token = None) -> bool:
    """Extend the lease by its own length from now. Return False if the lease is lost."""
    return bool(renew_lease_many(db, [outbox_id], worker_id, lease_token=lease_token))


def renew_lease_many(db: Db, outbox_ids: Collection[int], worker_id: str, *, lease_token: Token = None) -> set[int]:
    """Extend each lease by its own length from now."""
    return _execute(db, RENEW, worker_id, lease_token, outbox_ids)


def release_lease(db: Db, outbox_id: int, worker_id: str, *, lease_token: Token = None) -> bool:
    """Release an event that was not published. Return False if the lease is lost."""
    return bool(release_lease_many(db, [outbox_id], worker_id, lease_token=lease_token))


def release_lease_many(db: Db, outbox_ids: Collection[int], worker_id: str, *, lease_token: Token = None) -> set[int]:
    """Release events that were not published."""
    return _execute(db, RELEASE, worker_id, lease_token, outbox_ids)


def check_dedup(db: Db, destination: str, payload_sha: str) -> SentDuplicate | None:
    """Return the newest SENT event of this destination with this payload hash or explicit dedup key."""
    return check_dedup_many(db, [(destination, payload_sha)]).get((destination, payload_sha))


def check_dedup_many(db: Db, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], SentDuplicate]:
    """Return the duplicates of many pairs of destination and hash or key, found by one query."""
    values = {"destinations": [name for name, _ in wanted], "keys": [key for _, key in wanted]}
    rows = connection_of(db).execute(DEDUP, values)
    return {(row.destination, row.key): SentDuplicate(row.id, row.external_id, row.sent_at) for row in rows}


def connection_of(db: Db) -> Connection:
    """Return the connection on which a session or connection executes."""
    return db.connection() if isinstance(db, Session) else db


def _execute(
    db: Db, statement: TextClause, worker_id: str, lease_token: Token, ids: Collection[int], **columns: list[Any]
) -> set[int]:
    """Change the rows that the worker still holds and return their ids. `columns` have one value per id."""
    if not ids:
        return set()
    values = {"worker_id": worker_id, "lease_token": lease_token, "id": list(ids), **columns}
    return set(connection_of(db).execute(statement, values).scalars())


def _idle_connection(db: Db) -> Connection:
    """Return a connection without an open transaction: the commit of a claim must commit nothing but the claim.

    A session inside a transaction of its connection is refused too: its commit would not commit the claim.
    """
    bind = db.get_bind() if isinstance(db, Session) else db
    if db.in_transaction() or (isinstance(bind, Connection) and bind.in_transaction()):
        raise Misuse("claim_outbox commits, but this connection has an open transaction: end it or use another one.")
    return connection_of(db)


def _storable(external_ids: Mapping[int, str | None]) -> list[str | None]:
    return [text and storable(text) for text in external_ids.values()]


def _time(given: datetime | str) -> datetime:
    """Return a time that means the same on every machine. Raises Misuse."""
    try:
        at = datetime.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        raise Misuse(f"{given!r} is not a time: write it like 2026-01-30T12:00:00+00:00.") from None
    if at.tzinfo is None:
        raise Misuse(f"The time {at.isoformat()} needs a time zone.")
    return at


def _tail(error: str) -> str:
    """Return the end of an error, where a traceback has its reason."""
    return storable(error[-LAST_ERROR_LIMIT:])
