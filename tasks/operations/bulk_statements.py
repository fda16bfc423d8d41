"""The SQL of bulk actions: count what an action would change, and change one batch of it.

    requeue    DEAD                               ──► QUEUED
    discard    QUEUED | RETRYING | DEAD           ──► DISCARDED
    run-now    RETRYING, or QUEUED for later      ──► due now

A statement chooses tasks by the filter of a search (`listing.MATCHES`), and only those that have not changed since
`as_of`: what dies, is submitted or is retried later was not in the preview, and is left as it is. So a batch that is
repeated after a crash, or at the same time by another process, changes nothing twice.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause

from models.bulk_actions import BulkVerb
from models.sql import sql
from models.status import TaskStatus
from tasks.core.discarding import DISCARD_HELD
from tasks.operations.dead_tasks import REQUEUE_HELD
from tasks.operations.listing import DEAD, MATCHES, RETRYING, WAITING, Source, TaskFilter, narrowed
from tasks.operations.retry_now import MAKE_DUE_HELD

COUNT_CEILING: Final = 20_000  # tasks read from each index for a preview
MOST_GROUPS: Final = 50
_SOURCES: Final = {
    BulkVerb.REQUEUE: (DEAD,),
    BulkVerb.DISCARD: (DEAD, WAITING),
    BulkVerb.RUN_NOW: (WAITING,),
}
_CLOCK: Final = "clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)"
# The sinks of the task have forgotten its keys, so they could not recognise a repeated effect.
_FORGOTTEN: Final = """EXISTS (
        SELECT FROM unnest(CAST(:limited_types AS text[]), CAST(:limited_seconds AS float8[])) AS age(of_type, seconds)
        WHERE of_type = type AND created_at < (SELECT at FROM clock) - make_interval(secs => seconds))"""


def preview(verb: BulkVerb, chosen: TaskFilter) -> TextClause:
    """preview: count the first tasks of each index by status, type and error."""
    read = " UNION ALL ".join(
        f"""(SELECT status, type, error_code, left(error_message, 200) AS message, {_matches(verb)} AS matches,
                    {_FORGOTTEN} AS forgotten
             FROM (SELECT * FROM ledger.ingest_task WHERE {_range(each, chosen)}
                   ORDER BY {each.changed_at}, id LIMIT :ceiling) AS oldest)"""
        for each in needed_sources(verb, chosen)
    )
    return sql(f"""
        WITH {_CLOCK}, read AS MATERIALIZED ({read})
        SELECT all_read.*, found.*
        FROM (SELECT count(*) AS read, count(*) FILTER (WHERE matches) AS total,
                     count(*) FILTER (WHERE matches AND forgotten) AS left_out FROM read) AS all_read
        LEFT JOIN (SELECT status, type, error_code, min(message), count(*) AS number FROM read WHERE matches
                   GROUP BY 1, 2, 3 ORDER BY count(*) DESC, 1, 2, 3 LIMIT {MOST_GROUPS}) AS found ON true
        ORDER BY found.number DESC, status, type, error_code
    """)


def count(verb: BulkVerb, chosen: TaskFilter) -> TextClause:
    """count: all tasks that the action would change, and those that it leaves out, without a ceiling."""
    found = " UNION ALL ".join(
        f"""(SELECT {_FORGOTTEN} AS forgotten FROM ledger.ingest_task
             WHERE {_range(each, chosen)} AND {_matches(verb)})"""
        for each in needed_sources(verb, chosen)
    )
    return sql(f"""
        WITH {_CLOCK} SELECT count(*), count(*) FILTER (WHERE forgotten AND NOT :accept_duplicates)
        FROM ({found}) AS found
    """)


def change(verb: BulkVerb, source: Source, chosen: TaskFilter) -> TextClause:
    """change: the next batch of tasks in their order; skips those that another process is just changing."""
    at = source.changed_at
    last = "ORDER BY changed_at DESC, id DESC LIMIT 1"
    held = f"""
        WITH {_CLOCK},
        held AS MATERIALIZED (
            SELECT id, status, type, partition_key, key_seq, next_retry_at, {at} AS changed_at FROM ledger.ingest_task
            WHERE {_range(source, chosen)} AND {_matches(verb)} AND (:accept_duplicates OR NOT {_FORGOTTEN})
              AND ({at}, id) > (:after_at, :after_id)
            ORDER BY {at}, id LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED)"""
    found = f"""
        SELECT (SELECT array_agg(id) FROM held) AS changed, (SELECT changed_at FROM held {last}) AS after_at,
               (SELECT id FROM held {last}) AS after_id"""
    match verb:
        case BulkVerb.REQUEUE:
            return sql(f"{held}, {REQUEUE_HELD} {found}, ours FROM wakeups")
        case BulkVerb.DISCARD:
            return sql(f"{held}, {DISCARD_HELD} {found}, ours FROM wakeups")
        case BulkVerb.RUN_NOW:
            return sql(f"{held}, {MAKE_DUE_HELD} {found}, CAST('[]' AS jsonb) AS ours")


def needed_sources(verb: BulkVerb, chosen: TaskFilter) -> list[Source]:
    """Return the indexes that have tasks that the action changes. If there are none, its statements find nothing."""
    statuses = frozenset(chosen.statuses or TaskStatus)
    needed = [each for each in _SOURCES[verb] if each.statuses & statuses] or list(_SOURCES[verb][:1])
    return [RETRYING if each.statuses & statuses == RETRYING.statuses else each for each in needed]


def _range(source: Source, chosen: TaskFilter) -> str:
    """Return the condition that an index answers: which of its tasks are read."""
    at = source.changed_at
    return f"{narrowed(source, chosen)} AND {at} >= :since AND {at} < :until AND {at} <= :as_of"


def _matches(verb: BulkVerb) -> str:
    """Return the condition that a task that was read is changed."""
    return f"{MATCHES} AND next_retry_at > (SELECT at FROM clock)" if verb is BulkVerb.RUN_NOW else MATCHES
