"""The statements of the lease protocol, each with the transition that it makes; `outbox/lease.py` has the contract."""

# ruff: noqa: S608 - every piece is a literal of this file; values are parameters

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text

# A row that the caller still holds. With a token the token decides; without one, the name and a live lease.
_HELD: Final = """
    e.status IN ('NEW', 'RETRYING') AND e.locked_by = :worker_id
    AND CASE WHEN CAST(:lease_token AS uuid) IS NULL THEN e.lease_until > (SELECT at FROM clock)
             ELSE e.lease_token = CAST(:lease_token AS uuid) END
"""
_RELEASED: Final = "locked_by = NULL, locked_at = NULL, lease_token = NULL, lease_until = NULL"


def _held_update(changes: str, *, columns: str = "", types: str = "") -> TextClause:
    """One statement for a batch: lock the held rows in the order of their ids, then change them.

    `columns` are further arrays, one value per id.
    """
    names = ", ".join(["id", *filter(None, [columns])])
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _pairs(columns, types))
    return text(f"""
        WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
        given AS MATERIALIZED (SELECT * FROM unnest({arrays}) AS given({names})),
        held AS MATERIALIZED (
            SELECT e.id FROM outbox_event e WHERE e.id IN (SELECT id FROM given) AND {_HELD}
            ORDER BY e.id FOR NO KEY UPDATE OF e)
        UPDATE outbox_event e SET {changes}
        FROM held JOIN given USING (id) WHERE e.id = held.id
        RETURNING e.id
    """)


def _pairs(columns: str, types: str) -> list[tuple[str, str]]:
    further = zip(filter(None, columns.split(", ")), filter(None, types.split(", ")), strict=True)
    return [("id", "bigint"), *further]


# waiting: the destinations that have unsent events, found by hopping from one to the next in the index.
WAITING: Final = """
    hop (destination) AS (
        SELECT min(destination) FROM outbox_event WHERE status IN ('NEW', 'RETRYING')
        UNION ALL
        SELECT (SELECT min(e.destination) FROM outbox_event e
                WHERE e.status IN ('NEW', 'RETRYING') AND e.destination > hop.destination)
        FROM hop WHERE hop.destination IS NOT NULL),
    waiting AS (SELECT destination FROM hop WHERE destination IS NOT NULL)
"""
GIVEN: Final = "waiting AS (SELECT * FROM unnest(CAST(:only AS text[])) AS given(destination))"

# claim: NEW|RETRYING, due and without a live lease → leased; oldest due first, skipping what others are locking.
# Each destination is a range of the index: one that is left out costs nothing, however many events wait for it.
CLAIM: Final = """
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger_now() AS at),
    {waiting},
    due AS MATERIALIZED (
        SELECT first.id FROM waiting CROSS JOIN LATERAL (
            SELECT e.id, coalesce(e.next_retry_at, '-infinity') AS due_at FROM outbox_event e
            WHERE e.destination = waiting.destination AND e.status IN ('NEW', 'RETRYING')
              AND coalesce(e.next_retry_at, '-infinity') <= (SELECT at FROM clock)
              AND (e.lease_until IS NULL OR e.lease_until <= (SELECT at FROM clock)){after}
            ORDER BY coalesce(e.next_retry_at, '-infinity'), e.id
            LIMIT :limit FOR NO KEY UPDATE OF e SKIP LOCKED) AS first
        WHERE waiting.destination <> ALL(CAST(:without AS text[]))
        ORDER BY first.due_at, first.id
        LIMIT :limit)
    UPDATE outbox_event e
    SET locked_by = :worker_id, locked_at = clock.at, lease_token = :lease_token,
        lease_until = clock.at + make_interval(secs => :lease_seconds)
    FROM due, clock WHERE e.id = due.id
    RETURNING e.id, e.destination, e.payload, e.payload_sha, e.headers, e.attempt_count, e.lease_token,
              greatest(e.created_at, e.next_retry_at) AS waiting_since
"""
CLAIM_ANY: Final = text(CLAIM.format(waiting=WAITING, after=""))
CLAIM_GIVEN: Final = text(CLAIM.format(waiting=GIVEN, after=" AND e.id > :after"))

# ack: held → SENT.
ACK: Final = _held_update(
    f"status = 'SENT', sent_at = (SELECT at FROM clock), next_retry_at = NULL, last_error = NULL, "
    f"external_id = given.external_id, {_RELEASED}",
    columns="external_id",
    types="text",
)
# retry: held → RETRYING, one failure more, due again at the time given.
RETRY: Final = _held_update(
    f"status = 'RETRYING', attempt_count = e.attempt_count + 1, last_error = given.error, "
    f"next_retry_at = given.next_attempt_at, {_RELEASED}",
    columns="error, next_attempt_at",
    types="text, timestamptz",
)
# dead: held → DEAD, one failure more.
DEAD: Final = _held_update(
    f"status = 'DEAD', attempt_count = e.attempt_count + 1, last_error = given.error, next_retry_at = NULL, "
    f"{_RELEASED}",
    columns="error",
    types="text",
)
# renew: held → held for as long again as the lease was.
RENEW: Final = _held_update(
    "lease_until = (SELECT at FROM clock) + (e.lease_until - e.locked_at), locked_at = (SELECT at FROM clock)"
)
# release: held → given back unpublished, no failure counted.
RELEASE: Final = _held_update(_RELEASED)

# dedup: the newest SENT event per (destination, payload_sha).
DEDUP: Final = text("""
    SELECT DISTINCT ON (e.destination, e.payload_sha) e.destination, e.payload_sha, e.id, e.external_id, e.sent_at
    FROM unnest(CAST(:destinations AS text[]), CAST(:payload_shas AS text[])) AS given(destination, payload_sha)
    JOIN outbox_event e USING (destination, payload_sha)
    WHERE e.status = 'SENT' AND e.payload_sha IS NOT NULL
    ORDER BY e.destination, e.payload_sha, e.sent_at DESC, e.id DESC
""")

# The destinations that have unsent events.
DESTINATIONS: Final = text(f"WITH RECURSIVE {WAITING} SELECT destination FROM waiting")

# hasten: RETRYING because nobody answered → due at once.
HASTEN: Final = text("""
    WITH held_back AS MATERIALIZED (
        SELECT e.id FROM outbox_event e
        WHERE e.destination = :destination AND e.status = 'RETRYING' AND e.lease_token IS NULL
          AND e.last_error LIKE :prefix AND coalesce(e.next_retry_at, '-infinity') > (SELECT ledger_now())
        ORDER BY e.id FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE outbox_event e SET next_retry_at = (SELECT ledger_now()) FROM held_back WHERE e.id = held_back.id
""")

NOW: Final = text("SELECT ledger_now()")
