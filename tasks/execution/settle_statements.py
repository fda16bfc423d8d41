"""The statements that settle tasks, each with the transition that it makes; `tasks/execution/settle.py` says when.

All of them lock the rows that this token holds, in the order of ids (P14), change them, write their transitions, and
return the ids and the wake-ups that this process must publish. The last one of a lease ends it: it locks the lease first,
as reclaim does, so that the two never wait for each other.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from typing import Final

from models.prepared import Prepared
from models.sql import sql
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import notified

_ERRORS: Final = "last_error = given.last_error, error_message = given.error_message, error_code = given.error_code"
_NO_ERRORS: Final = "last_error = NULL, error_message = NULL, error_code = NULL"
_NOW: Final = "(SELECT at FROM clock)"
_LATER: Final = f"{_NOW} + make_interval(secs => given.wait_ms / 1000)"


def _settling(*, arrays: str, to: str, changes: str, message: str, then: str, before: str = "") -> Prepared:
    """RUNNING under this token → `to`. `arrays` are further columns, one value per id: "name type, name type".

    LATERAL and ANY make the planner look rows up by their ids, whatever it believes of the size of the table.
    """
    columns = [("id", "uuid"), *((pair.split()[0], pair.split()[1]) for pair in arrays.split(", ") if pair)]
    casts = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    given = "JOIN held AS given USING (id)" if "given." in message else ""
    return Prepared(
        f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        lease AS MATERIALIZED (SELECT token FROM ledger.task_lease WHERE token = :token AND :is_last FOR UPDATE),
        held AS MATERIALIZED (
            SELECT given.* FROM (SELECT * FROM unnest({casts}) AS given({names}) ORDER BY id) AS given
            CROSS JOIN LATERAL (
                SELECT FROM ledger.ingest_task WHERE id = given.id AND lease_token = :token AND status = 'RUNNING'
                AND (SELECT count(*) FROM lease) >= 0 FOR NO KEY UPDATE) AS task),
        done AS (
            UPDATE ledger.ingest_task task
            SET status = '{to}', lease_token = NULL, updated_at = {_NOW}, {changes}
            FROM held AS given WHERE task.id = given.id AND task.id = ANY(ARRAY(SELECT id FROM held))
            RETURNING task.id, task.type, task.queue, task.priority, task.isolated, task.attempt_count,
                      task.next_retry_at, task.notify, task.error_code, task.error_message, task.partition_key),
        told AS (
            INSERT INTO ledger.ingest_task_transition
                (task_id, from_status, to_status, attempt_count, message, actor, created_at)
            SELECT id, 'RUNNING', '{to}', attempt_count, {message}, :actor, {_NOW} FROM done {given}),
        ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last){then}
    """,
        before=before,
    )


def _final(status: str) -> str:
    return f",{notified('done', status)}"


# NULL: all of them, as nearly always; a thousand ids need not travel to say so.
_IDS: Final = """SELECT CASE WHEN (SELECT count(*) FROM done) < cardinality(CAST(:id AS uuid[]))
                             THEN (SELECT coalesce(array_agg(id), '{}') FROM done) END"""
_WOKEN: Final = f""",
        again AS (
            SELECT id, type, queue, priority, isolated, CASE WHEN next_retry_at > at THEN next_retry_at END AS due_at
            FROM done CROSS JOIN clock),
        {wakeups.wake("again")}
        {_IDS}, ours FROM wakeups"""

# begin_batch: a COMMIT reads a cursor WITH HOLD to its end. This one cannot be read: whoever commits before SUCCEED has
# closed it gets an error, and all is rolled back. Whoever rolls back leaves SUCCEED no cursor to close (P3).
BEGIN_BATCH: Final = sql("""
    DECLARE celeriac_batch NO SCROLL CURSOR WITH HOLD FOR
    SELECT CAST(concat('a handler does not end the transaction that it was given') AS integer)
""")
NO_SUCH_CURSOR: Final = "34000"

# check_deferred: what a COMMIT would find, without one; afterwards constraints are as deferred as they were.
CHECK_DEFERRED: Final = sql("""
    SAVEPOINT celeriac_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO celeriac_check; RELEASE celeriac_check
""")

# Of a final state: nothing else; or, where tasks have partition keys, a wake-up for whoever is first there now (P9).
_ENDED: Final = f" {_IDS}, '[]'::jsonb"
_PASSED_ON: Final = f""",
        {partition_keys.freed("done")},
        {wakeups.wake("freed")}
        {_IDS}, ours FROM wakeups"""

_SUCCEED: Final[dict[str, str]] = {
    "arrays": "result text",
    "to": "SUCCEEDED",
    "changes": f"finished_at = (SELECT at FROM clock), next_retry_at = NULL, {_NO_ERRORS}, "
    "result = CAST(given.result AS jsonb)",
    "message": "NULL",
}
_IN_BATCH: Final = "CLOSE celeriac_batch;"
SUCCEED: Final = _settling(**_SUCCEED, then=_final("SUCCEEDED") + _ENDED)
SUCCEED_IN_BATCH: Final = _settling(**_SUCCEED, then=_final("SUCCEEDED") + _ENDED, before=_IN_BATCH)
SUCCEED_KEYED: Final = _settling(**_SUCCEED, then=_final("SUCCEEDED") + _PASSED_ON)
SUCCEED_KEYED_IN_BATCH: Final = _settling(**_SUCCEED, then=_final("SUCCEEDED") + _PASSED_ON, before=_IN_BATCH)
_DISCARD: Final[dict[str, str]] = {
    "arrays": "why text",
    "to": "DISCARDED",
    "changes": f"finished_at = (SELECT at FROM clock), {_NO_ERRORS}",
    "message": "given.why",
}
DISCARD: Final = _settling(**_DISCARD, then=_final("DISCARDED") + _ENDED)
DISCARD_KEYED: Final = _settling(**_DISCARD, then=_final("DISCARDED") + _PASSED_ON)
RETRY: Final = _settling(
    arrays="wait_ms float8, last_error text, error_message text, error_code text",
    to="RETRYING",
    changes=f"attempt_count = task.attempt_count + 1, {_ERRORS}, next_retry_at = {_LATER}, last_wakeup_at = {_LATER}",
    message="error_message",
    then=_WOKEN,
)
SNOOZE: Final = _settling(
    arrays="wait_ms float8, why text",
    to="RETRYING",
    changes=f"next_retry_at = {_LATER}, last_wakeup_at = {_LATER}",
    message="given.why",
    then=_WOKEN,
)
# isolate: its batch was lost with it in it, so it runs alone next time; no attempt is burned (P5).
ISOLATE: Final = _settling(
    arrays="why text",
    to="RETRYING",
    changes=f"isolated = true, next_retry_at = {_NOW}, last_wakeup_at = {_NOW}",
    message="given.why",
    then=_WOKEN,
)
RELEASE: Final = _settling(
    arrays="why text",
    to="QUEUED",
    changes="last_wakeup_at = (SELECT at FROM clock)",
    message="given.why",
    then=_WOKEN,
)
_DEAD: Final[dict[str, str]] = {
    "arrays": "last_error text, error_message text, error_code text",
    "to": "DEAD",
    "changes": f"attempt_count = task.attempt_count + 1, {_ERRORS}, next_retry_at = NULL,"
    " finished_at = (SELECT at FROM clock)",
    "message": "error_message",
}
_LETTERED: Final = f""",
        lettered AS (
            INSERT INTO ledger.outbox_event (destination, payload, created_at)
            SELECT :dead_letters, jsonb_build_object('dead', id, 'errorCode', error_code), at
            FROM done CROSS JOIN clock WHERE :dead_letters <> ''){_final("DEAD")}"""
DEAD: Final = _settling(**_DEAD, then=_LETTERED + _ENDED)
DEAD_SKIPPED: Final = _settling(**_DEAD, then=_LETTERED + _PASSED_ON)  # its key goes on without it

# audit: what a holder was refused; the lease ends here if nothing is left to be settled.
AUDIT: Final = sql("""
    WITH ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last)
    INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id, coalesce('now ' || task.status, 'gone')
    FROM unnest(CAST(:id AS uuid[])) AS given(id) LEFT JOIN ledger.ingest_task task USING (id)
""")
