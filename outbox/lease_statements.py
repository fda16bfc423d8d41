"""The statements of the lease protocol, each with the transition that it makes; outbox/lease.py has the contract."""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause

from models.sql import sql

# A row that the caller still holds. With a token the token decides; without one, the name and a live lease. A row that
# another program locked with `locked_by` and `locked_at` alone does not say how long its lease is: the name decides.
_HELD: Final = """
    e.status IN ('NEW', 'RETRYING') AND e.locked_by = :worker_id
    AND CASE WHEN CAST(:lease_token AS uuid) IS NULL THEN coalesce(e.lease_until > (SELECT at FROM clock), true)
             ELSE e.lease_token = CAST(:lease_token AS uuid) END
"""
_RELEASED: Final = "locked_by = NULL, locked_at = NULL, lease_token = NULL, lease_until = NULL"


def _held_update(changes: str, *, audit: str = "", **columns: str) -> TextClause:
    """Return a statement for a batch: it locks the held rows in the order of their ids, then changes them.

    `columns` are the names and types of further arrays that have one value per id. `audit` selects from `changed`
    what is written to the audit in the same statement.
    """
    update = f"UPDATE ledger.outbox_event e SET {changes} FROM held JOIN given USING (id) WHERE e.id = held.id"
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in {"id": "bigint", **columns}.items())
    return sql(f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        given AS MATERIALIZED (SELECT * FROM unnest({arrays}) AS given({", ".join(["id", *columns])})),
        held AS MATERIALIZED (
            SELECT e.id FROM ledger.outbox_event e WHERE e.id IN (SELECT id FROM given) AND {_HELD}
            ORDER BY e.id FOR NO KEY UPDATE OF e)
        {_audited(update, audit) if audit else f"{update} RETURNING e.id"}
    """)


def _audited(update: str, audit: str) -> str:
    """Return the end of a statement that changes rows and audits them. It returns their ids, and their `sent_at`."""
    return f""", changed AS ({update} RETURNING e.id, e.destination, e.external_id, e.sent_at),
        audits AS (INSERT INTO ledger.outbox_audit (code, worker_id, outbox_id, detail, created_at) {audit})
        SELECT coalesce(array_agg(id), '{{}}') AS ids, min(sent_at) AS sent_at FROM changed"""


# waiting: the destinations that have unsent events, found by skipping from one to the next in the two indexes.
_NEXT_DESTINATION: Final = """least(
            (SELECT min(destination) FROM ledger.outbox_event
             WHERE status IN ('NEW', 'RETRYING') AND ordering_key IS NULL{above}),
            (SELECT min(destination) FROM ledger.outbox_event
             WHERE status <> 'SENT' AND ordering_key IS NOT NULL{above}))"""
WAITING: Final = f"""
    hop (name) AS (
        SELECT {_NEXT_DESTINATION.format(above="")}
        UNION ALL
        SELECT {_NEXT_DESTINATION.format(above=" AND destination > hop.name")} FROM hop WHERE hop.name IS NOT NULL),
    waiting AS (SELECT name AS destination FROM hop WHERE name IS NOT NULL)
"""
_GIVEN: Final = "waiting AS (SELECT CAST(:only AS text) AS destination)"

_DUE_AT: Final = "coalesce(e.next_retry_at, '-infinity')"
# A row that is locked by `locked_by` and `locked_at` alone is free again after the lease of the worker that asks.
_FREE: Final = """(CASE WHEN e.lease_until IS NOT NULL THEN e.lease_until <= (SELECT at FROM clock)
                 ELSE e.locked_at IS NULL
                      OR e.locked_at < (SELECT at FROM clock) - make_interval(secs => :lease_seconds) END)"""
_UNORDERED: Final = "e.destination = waiting.destination AND e.status IN ('NEW', 'RETRYING') AND e.ordering_key IS NULL"

# The three kinds of due events. Each is the part of an index range above the floor (`Floor` in outbox/lease.py).
_FRESH: Final = f"""
            SELECT e.id, e.created_at AS since FROM ledger.outbox_event e
            WHERE {_UNORDERED} AND {_DUE_AT} = '-infinity' AND {_FREE} AND e.id > :fresh_id
            ORDER BY e.id LIMIT :limit FOR NO KEY UPDATE OF e SKIP LOCKED"""
_SCHEDULED: Final = f"""
            SELECT e.id, e.next_retry_at AS since FROM ledger.outbox_event e
            WHERE {_UNORDERED} AND ({_DUE_AT}, e.id) > (:scheduled_at, :scheduled_id)
              AND {_DUE_AT} <= (SELECT at FROM clock) AND {_FREE}
            ORDER BY {_DUE_AT}, e.id LIMIT :limit FOR NO KEY UPDATE OF e SKIP LOCKED"""
# A key waits for its first event that is not SENT, even if that one is DEAD. Keys are found by skipping, too.
_OF_KEYS: Final = "destination = waiting.destination AND status <> 'SENT'"
_HEADS: Final = f"""
            WITH RECURSIVE key (name) AS (
                (SELECT ordering_key FROM ledger.outbox_event
                 WHERE {_OF_KEYS} AND ordering_key >= :key ORDER BY ordering_key LIMIT 1)
                UNION ALL
                SELECT (SELECT ordering_key FROM ledger.outbox_event
                        WHERE {_OF_KEYS} AND ordering_key > key.name ORDER BY ordering_key LIMIT 1)
                FROM key WHERE key.name IS NOT NULL)
            SELECT head.* FROM key CROSS JOIN LATERAL (
                SELECT e.id, coalesce(e.next_retry_at, e.created_at) AS since FROM ledger.outbox_event e
                WHERE e.id = (SELECT id FROM ledger.outbox_event
                              WHERE {_OF_KEYS} AND ordering_key = key.name ORDER BY id LIMIT 1)
                  AND e.status IN ('NEW', 'RETRYING') AND {_DUE_AT} <= (SELECT at FROM clock) AND {_FREE}
                FOR NO KEY UPDATE OF e SKIP LOCKED) AS head
            WHERE key.name IS NOT NULL LIMIT :limit"""

# claim: NEW|RETRYING, due and without a live lease → leased; longest waiting first, skipping rows that others lock.
# Each destination is a range of the index: with CLAIM_GIVEN the others cost nothing, however many events they have.
_CLAIM: Final = f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    {{waiting}},
    fresh AS MATERIALIZED (SELECT first.* FROM waiting CROSS JOIN LATERAL ({_FRESH}) AS first),
    scheduled AS MATERIALIZED (SELECT first.* FROM waiting CROSS JOIN LATERAL ({_SCHEDULED}) AS first),
    heads AS MATERIALIZED (SELECT first.* FROM waiting CROSS JOIN LATERAL ({_HEADS}) AS first),
    due AS MATERIALIZED (
        SELECT id FROM (TABLE fresh UNION ALL TABLE scheduled UNION ALL TABLE heads) AS free
        ORDER BY since, id LIMIT :limit)
    UPDATE ledger.outbox_event e
    SET locked_by = :worker_id, locked_at = clock.at, lease_token = :lease_token,
        lease_until = clock.at + make_interval(secs => :lease_seconds)
    FROM due, clock WHERE e.id = due.id
    RETURNING e.id, e.destination, e.payload, e.payload_sha, e.headers, e.attempt_count, e.lease_token,
              greatest(e.created_at, e.next_retry_at) AS waiting_since, e.next_retry_at, e.dedup_key, e.ordering_key
"""
CLAIM_ANY: Final = sql(_CLAIM.format(waiting=WAITING))
CLAIM_GIVEN: Final = sql(_CLAIM.format(waiting=_GIVEN))

# ack: held → SENT.
_SENT: Final = (
    "status = 'SENT', sent_at = (SELECT at FROM clock), next_retry_at = NULL, last_error = NULL, "
    f"external_id = given.external_id, {_RELEASED}"
)
ACK: Final = _held_update(_SENT, external_id="text")
# ack, each event audited: held → SENT.
ACK_AND_AUDIT: Final = _held_update(
    _SENT,
    audit="SELECT 'outbox_flush_success', :worker_id, id, coalesce(external_id, ''), sent_at FROM changed",
    external_id="text",
)
# ack, audited as one batch: held → SENT. The entry belongs to the first event, and is pruned with it.
ACK_AND_AUDIT_BATCH: Final = _held_update(
    _SENT,
    audit="""SELECT 'outbox_flush_success', :worker_id, min(id),
               format('%s sent to %s, ids %s to %s', count(*), min(destination), min(id), max(id)), min(sent_at)
        FROM changed HAVING count(*) > 0""",
    external_id="text",
)
# retry: held → RETRYING, one more failure, due again at the given time.
RETRY: Final = _held_update(
    "status = 'RETRYING', attempt_count = e.attempt_count + 1, last_error = given.error, "
    f"next_retry_at = given.next_attempt_at, {_RELEASED}",
    error="text",
    next_attempt_at="timestamptz",
)
# dead: held → DEAD, one more failure.
DEAD: Final = _held_update(
    "status = 'DEAD', attempt_count = e.attempt_count + 1, last_error = given.error, next_retry_at = NULL, "
    f"{_RELEASED}",
    error="text",
)
# renew: held → held, for the length of the lease from now.
RENEW: Final = _held_update(
    "lease_until = (SELECT at FROM clock) + (e.lease_until - e.locked_at), locked_at = (SELECT at FROM clock)"
)
# release: held → free and unpublished, no failure counted.
RELEASE: Final = _held_update(_RELEASED)

_SAMENESS_LOCK: Final = """hashtextextended(concat_ws(chr(31), 'dedup', destination, key),
                                            CAST(CAST('ledger.outbox_event' AS regclass) AS bigint))"""
# lock_sameness: lock what makes events equal, until it is unlocked or the connection ends; return what could be locked.
LOCK_SAMENESS: Final = sql(f"""
    SELECT destination, key FROM unnest(CAST(:destinations AS text[]), CAST(:keys AS text[])) AS given(destination, key)
    WHERE pg_try_advisory_lock({_SAMENESS_LOCK})
""")
UNLOCK_SAMENESS: Final = sql(f"""
    SELECT pg_advisory_unlock({_SAMENESS_LOCK})
    FROM unnest(CAST(:destinations AS text[]), CAST(:keys AS text[])) AS given(destination, key)
""")

# dedup: the newest SENT event per destination and dedup key, which is the payload's hash where no key was given.
DEDUP: Final = sql("""
    SELECT given.destination, given.key, sent.id, sent.external_id, sent.sent_at
    FROM unnest(CAST(:destinations AS text[]), CAST(:keys AS text[])) AS given(destination, key)
    CROSS JOIN LATERAL (
        SELECT e.id, e.external_id, e.sent_at FROM ledger.outbox_event e
        WHERE e.destination = given.destination AND coalesce(e.dedup_key, e.payload_sha) = given.key
          AND e.status = 'SENT'
        ORDER BY e.sent_at DESC, e.id DESC LIMIT 1) AS sent
""")

# The last error of an event begins like this if its destination gave no answer. An index depends on it.
UNREACHABLE: Final = "unreachable: "
_GOT_NO_ANSWER: Final = f"e.last_error LIKE '{UNREACHABLE}%'"
_DIED_UNANSWERED: Final = f"e.destination = :destination AND e.status = 'DEAD' AND {_GOT_NO_ANSWER}"

# The destinations that have unsent events, or wake-ups that died because it was unreachable (`has_dead`).
DESTINATIONS: Final = sql(f"""
    WITH RECURSIVE {WAITING}
    SELECT destination, bool_or(is_dead) AS has_dead FROM (
        SELECT destination, false AS is_dead FROM waiting
        UNION ALL
        SELECT name, true FROM unnest(CAST(:wakeups AS text[])) AS name WHERE EXISTS (
            SELECT FROM ledger.outbox_event e WHERE e.destination = name AND e.status = 'DEAD' AND {_GOT_NO_ANSWER})
    ) AS found GROUP BY destination ORDER BY destination
""")

# make due: RETRYING because the destination was unreachable → due now.
MAKE_DUE: Final = sql(f"""
    WITH held_back AS MATERIALIZED (
        SELECT e.id FROM ledger.outbox_event e
        WHERE e.destination = :destination AND e.status = 'RETRYING' AND e.locked_at IS NULL
          AND {_GOT_NO_ANSWER} AND e.next_retry_at > (SELECT ledger.ledger_now())
        ORDER BY e.id FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE ledger.outbox_event e SET next_retry_at = (SELECT ledger.ledger_now())
    FROM held_back WHERE e.id = held_back.id
""")

# dead probe: the first event that died because the destination was unreachable; it is not changed.
DEAD_PROBE: Final = sql(f"""
    SELECT e.id, e.destination, e.payload, e.payload_sha, e.headers, e.attempt_count, gen_random_uuid(),
           greatest(e.created_at, e.next_retry_at)
    FROM ledger.outbox_event e WHERE {_DIED_UNANSWERED} ORDER BY e.id LIMIT 1
""")
# requeue: DEAD because the destination was unreachable → NEW, due now; attempts start again.
REQUEUE_UNANSWERED: Final = sql(f"""
    WITH died AS MATERIALIZED (
        SELECT e.id, e.attempt_count, e.last_error FROM ledger.outbox_event e WHERE {_DIED_UNANSWERED}
        ORDER BY e.id FOR NO KEY UPDATE SKIP LOCKED),
    audits AS (
        INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
        SELECT id, 'outbox_requeued', :worker_id,
               format('the destination answers again; failures: %s, last error: %s', attempt_count, last_error)
        FROM died)
    UPDATE ledger.outbox_event e
    SET status = 'NEW', attempt_count = 0, next_retry_at = NULL, locked_by = NULL, locked_at = NULL
    FROM died WHERE e.id = died.id RETURNING e.id
""")

NOW: Final = sql("SELECT ledger.ledger_now()")
