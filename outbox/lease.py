"""The lease protocol of the outbox.

Authority. A row belongs to whoever wrote the last `lease_token` into it. The database's clock (`ledger_now()`) says
when others may take over; the token says who may write. A holder whose lease has run out but whose row nobody took may
still finish it; a holder whose row was taken, even by itself a second time, may not.

    NEW ──claim──► NEW, leased ──ack_sent──────────► SENT
     ▲                 │  │  └──mark_dead_by_worker─► DEAD
     └─release_lease───┘  └─────fail_retry──────────► RETRYING ──claim──► RETRYING, leased ─► …

Claimable (P17): NEW or RETRYING, due (`next_retry_at` NULL or passed), no live lease. A claim is committed before it
returns, so that no transaction is open while the world is told. Every later statement names the holder and the token;
zero rows means that the lease is lost: the caller audits it (`outbox_flush_conflict`), drops the row, writes nothing.

Each function has a batch form, one statement for many rows, that returns the ids it really changed and takes its locks
in the order of ids (P14). Only `claim_outbox` commits; the others leave that to the caller. Without a token
(`lease_token=None`, for callers that know only the seed's arguments) the holder's name and an unexpired lease decide.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, TextClause
from sqlalchemy.orm import Session

from models.errors import Misuse
from outbox.lease_statements import ACK, CLAIM_ANY, CLAIM_GIVEN, DEAD, DEDUP, RELEASE, RENEW, RETRY

Db = Session | Connection
Arrays = dict[str, list[Any]]
LAST_ERROR_LIMIT: Final = 4000
_NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ClaimedEvent:
    """One row of a claim: what to publish, and the token that every later statement must name."""

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
        """Two events of one destination with the same one are the same message (P21)."""
        return self.dedup_key or self.payload_sha


@dataclass(frozen=True, slots=True)
class Floor:
    """How far a caller has just looked, in each of the three ranges of a destination's index.

    It skips the dead index entries of what was just sent. It must be forgotten soon: ids do not become visible in their
    order, and keys come back.
    """

    fresh_id: int = 0
    scheduled: tuple[datetime, int] = (datetime.min.replace(tzinfo=UTC), 0)
    key: str = ""  # inclusive

    @property
    def values(self) -> dict[str, Any]:
        """For the claim. Above the earliest of all times no event is fresh: those are due since -infinity."""
        at, id_ = self.scheduled
        return {"fresh_id": self.fresh_id, "scheduled_at": at, "scheduled_id": id_, "key": self.key}

    def above(self, events: Collection[ClaimedEvent]) -> Floor:
        """The floor after these were claimed."""
        fresh, scheduled, keys = [self.fresh_id], [self.scheduled], [self.key]
        for event in events:
            if event.ordering_key is not None:
                keys.append(event.ordering_key + "\x01")  # the very next, since no text holds a NUL
            elif event.next_retry_at is None:
                fresh.append(event.id)
            else:
                scheduled.append((event.next_retry_at, event.id))
        return Floor(max(fresh), max(scheduled), max(keys))


NO_FLOOR: Final = Floor()


@dataclass(frozen=True, slots=True)
class SentDuplicate:
    """An earlier event with the same payload that has reached the same destination."""

    id: int
    external_id: str | None
    sent_at: datetime


def claim_outbox(
    db: Db,
    worker_id: str,
    limit: int = 10,
    lease_seconds: float = 60,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    after: Floor = NO_FLOOR,
) -> list[ClaimedEvent]:
    """Lease up to `limit` due events, what waits longest first, and commit. The token is fresh, one for the batch.

    Of the events with one `ordering_key` only the first that is not SENT is ever claimed (P20). `only` and `without`
    name destinations; `after` goes with `only`.
    """
    connection = _connection_without_work(db)
    values = {
        "worker_id": worker_id,
        "limit": limit,
        "lease_seconds": lease_seconds,
        "lease_token": uuid.uuid4(),
        "without": list(without),
    }
    if only is not None:
        values |= {"only": list(set(only)), **after.values}
    rows = connection.execute(CLAIM_ANY if only is None else CLAIM_GIVEN, values).all()
    db.commit()
    return sorted((ClaimedEvent(*row) for row in rows), key=lambda event: (event.waiting_since, event.id))


def ack_sent(
    db: Db, outbox_id: int, worker_id: str, external_id: str | None = None, *, lease_token: uuid.UUID | None = None
) -> bool:
    """→ SENT. False: the lease is lost."""
    return bool(ack_sent_many(db, {outbox_id: external_id}, worker_id, lease_token=lease_token))


def ack_sent_many(
    db: Db, external_ids: Mapping[int, str | None], worker_id: str, *, lease_token: uuid.UUID | None = None
) -> set[int]:
    """→ SENT, each with its external id, or None."""
    values: Arrays = {
        "id": list(external_ids),
        "external_id": [None if given is None else _storable(given) for given in external_ids.values()],
    }
    return _execute(db, ACK, values, worker_id, lease_token)


def fail_retry(
    db: Db,
    outbox_id: int,
    worker_id: str,
    error: str,
    next_attempt_at: datetime,
    *,
    lease_token: uuid.UUID | None = None,
) -> bool:
    """→ RETRYING at a time that the caller computed. False: the lease is lost."""
    return bool(fail_retry_many(db, {outbox_id: (error, next_attempt_at)}, worker_id, lease_token=lease_token))


def fail_retry_many(
    db: Db, failures: Mapping[int, tuple[str, datetime]], worker_id: str, *, lease_token: uuid.UUID | None = None
) -> set[int]:
    """→ RETRYING, each with its error and its next attempt."""
    values: Arrays = {
        "id": list(failures),
        "error": [_short(error) for error, _ in failures.values()],
        "next_attempt_at": [at for _, at in failures.values()],
    }
    return _execute(db, RETRY, values, worker_id, lease_token)


def mark_dead_by_worker(
    db: Db, outbox_id: int, worker_id: str, error: str, *, lease_token: uuid.UUID | None = None
) -> bool:
    """→ DEAD, and one failure more, so that an exhausted event reads attempt_count = max_attempts."""
    return bool(mark_dead_many(db, {outbox_id: error}, worker_id, lease_token=lease_token))


def mark_dead_many(
    db: Db, errors: Mapping[int, str], worker_id: str, *, lease_token: uuid.UUID | None = None
) -> set[int]:
    """→ DEAD, each with its error."""
    values: Arrays = {"id": list(errors), "error": list(map(_short, errors.values()))}
    return _execute(db, DEAD, values, worker_id, lease_token)


def renew_lease(db: Db, outbox_id: int, worker_id: str, *, lease_token: uuid.UUID | None = None) -> bool:
    """Hold it for as long again as the lease was. False: the lease is lost."""
    return bool(renew_lease_many(db, [outbox_id], worker_id, lease_token=lease_token))


def renew_lease_many(
    db: Db, outbox_ids: Sequence[int], worker_id: str, *, lease_token: uuid.UUID | None = None
) -> set[int]:
    return _execute(db, RENEW, {"id": list(outbox_ids)}, worker_id, lease_token)


def release_lease(db: Db, outbox_id: int, worker_id: str, *, lease_token: uuid.UUID | None = None) -> bool:
    """Give it back unpublished. False: the lease is lost."""
    return bool(release_lease_many(db, [outbox_id], worker_id, lease_token=lease_token))


def release_lease_many(
    db: Db, outbox_ids: Sequence[int], worker_id: str, *, lease_token: uuid.UUID | None = None
) -> set[int]:
    return _execute(db, RELEASE, {"id": list(outbox_ids)}, worker_id, lease_token)


def check_dedup(db: Db, destination: str, payload_sha: str) -> SentDuplicate | None:
    """The newest event with this payload, or with this explicit dedup key, that has reached this destination."""
    return check_dedup_many(db, [(destination, payload_sha)]).get((destination, payload_sha))


def check_dedup_many(db: Db, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], SentDuplicate]:
    """The same for many, in one query."""
    values = {"destinations": [name for name, _ in wanted], "keys": [key for _, key in wanted]}
    rows = connection_of(db).execute(DEDUP, values)
    return {(row.destination, row.key): SentDuplicate(row.id, row.external_id, row.sent_at) for row in rows}


def _execute(db: Db, statement: TextClause, values: Arrays, worker_id: str, lease_token: uuid.UUID | None) -> set[int]:
    if not values["id"]:
        return set()
    parameters = values | {"worker_id": worker_id, "lease_token": lease_token}
    return set(connection_of(db).execute(statement, parameters).scalars())


def connection_of(db: Db) -> Connection:
    """Where a session or connection executes."""
    return db.connection() if isinstance(db, Session) else db


def _connection_without_work(db: Db) -> Connection:
    """A claim commits; somebody else's half-done work must not be committed with it.

    Nor would it be, by a session that joined a transaction of its connection: that one's commit is not the session's.
    """
    bind = db.get_bind() if isinstance(db, Session) else db
    if db.in_transaction() or (isinstance(bind, Connection) and bind.in_transaction()):
        raise Misuse("claim_outbox commits, and this connection has a transaction open: commit it or use another one.")
    return connection_of(db)


def _short(error: str) -> str:
    """The end of a long error is where its reason is."""
    return _storable(error[-LAST_ERROR_LIMIT:])


def _storable(given: str) -> str:
    """What the world answered, as text: PostgreSQL holds no NUL and no half of a surrogate pair (P12)."""
    return _NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", given)
