"""The statements that settle tasks: one template, filled in from a row of `TRANSITIONS` for each kind of outcome.

Each statement locks the rows that still have this token, in the order of their ids (docs/protocol.md, Lock order),
changes them, and writes their transitions. It returns the ids that it changed, and the wake-ups that this process must
publish. The last settling of a lease also deletes the lease. It locks the lease before the tasks, as reclaim does, so
that the two cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from models.prepared_statements import Prepared
from models.sql import sql
from tally.append import insert_tally
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import insert_notifications
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded

_NOW: Final = "(SELECT at FROM clock)"
_LATER: Final = f"{_NOW} + make_interval(secs => given.wait_ms / 1000)"
_FAILED: Final = """attempt_count = task.attempt_count + 1, last_error = given.last_error,
                error_message = given.error_message, error_code = given.error_code,
                error_fingerprint = ledger.ingest_error_fingerprint(given.error_code, given.error_message)"""
_NO_ERROR: Final = "last_error = NULL, error_message = NULL, error_code = NULL, error_fingerprint = NULL"
_ERROR_COLUMNS: Final = {"last_error": "text", "error_message": "text", "error_code": "text"}


@dataclass(frozen=True, slots=True)
class Transition:
    """RUNNING under a token → `to`."""

    to: str
    result: str  # in the tally
    columns: dict[str, str]  # name → type; parameters with one value for each task, which the statement calls `given`
    changes: str  # what else is set
    message: str = "given.why"  # of the transition in the task's history
    is_final: bool = False  # a task that is not final gets a wake-up


TRANSITIONS: Final[dict[type[Outcome], Transition]] = {
    Succeeded: Transition(
        "SUCCEEDED",
        "succeeded",
        {"result": "text"},
        f"finished_at = {_NOW}, next_retry_at = NULL, {_NO_ERROR}, result = CAST(given.result AS jsonb)",
        message="NULL",
        is_final=True,
    ),
    Discarded: Transition(
        "DISCARDED", "discarded", {"why": "text"}, f"finished_at = {_NOW}, {_NO_ERROR}", is_final=True
    ),
    Dead: Transition(
        "DEAD",
        "dead",
        _ERROR_COLUMNS,
        f"{_FAILED}, next_retry_at = NULL, finished_at = {_NOW}",
        message="error_message",
        is_final=True,
    ),
    Retry: Transition(
        "RETRYING",
        "retry",
        {"wait_ms": "float8", **_ERROR_COLUMNS},
        f"{_FAILED}, next_retry_at = {_LATER}, last_wakeup_at = {_LATER}",
        message="error_message",
    ),
    Snoozed: Transition(
        "RETRYING",
        "snoozed",
        {"wait_ms": "float8", "why": "text"},
        f"next_retry_at = {_LATER}, last_wakeup_at = {_LATER}",
    ),
    # Its batch was lost, so it runs alone next time. This does not count as an attempt (docs/protocol.md, Poison).
    Isolated: Transition(
        "RETRYING", "released", {"why": "text"}, f"isolated = true, next_retry_at = {_NOW}, last_wakeup_at = {_NOW}"
    ),
    Released: Transition("QUEUED", "released", {"why": "text"}, f"last_wakeup_at = {_NOW}"),
}

# begin_batch: guard a transaction against a COMMIT by its handler. COMMIT reads a cursor WITH HOLD to its end, and this
# one cannot be read: until settling has closed the cursor, a COMMIT fails and rolls everything back. After a ROLLBACK
# by the handler, settling finds no cursor to close and fails, too.
COMMIT_REFUSED: Final = "a handler does not end the transaction that it was given"  # in the error of that COMMIT
BEGIN_BATCH: Final = sql(f"""
    DECLARE celeriac_batch NO SCROLL CURSOR WITH HOLD FOR SELECT CAST(concat('{COMMIT_REFUSED}') AS integer)
""")
NO_SUCH_CURSOR: Final = "34000"

# check_deferred: check deferred constraints as a COMMIT would, without committing and without changing their mode.
CHECK_DEFERRED: Final = sql("""
    SAVEPOINT celeriac_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO celeriac_check; RELEASE celeriac_check
""")

# audit: record that the holder of a token was refused, and end its lease if none of its tasks is left.
AUDIT: Final = sql("""
    WITH ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last)
    INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id, coalesce('now ' || task.status, 'gone')
    FROM unnest(CAST(:id AS uuid[])) AS given(id) LEFT JOIN ledger.ingest_task task USING (id)
""")


@cache
def settling(outcome: Any, *, frees_keys: bool = False, in_batch: bool = False) -> Prepared:
    """Return the statement for one kind of outcome.

    `frees_keys`: it wakes the next task of each partition key in which a task became final. `in_batch`: it closes the
    cursor of `BEGIN_BATCH`.

    LATERAL and ANY make the planner look up rows by their ids, whatever its statistics say. The count of `lease` is
    never below 0; the comparison makes PostgreSQL lock the lease before the tasks.
    """
    transition = TRANSITIONS[outcome]
    columns = {"id": "uuid", **transition.columns}
    casts = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in columns.items())
    given = "JOIN held AS given USING (id)" if "given." in transition.message else ""
    return Prepared(
        f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        lease AS MATERIALIZED (SELECT token FROM ledger.task_lease WHERE token = :token AND :is_last FOR UPDATE),
        held AS MATERIALIZED (
            SELECT given.* FROM (SELECT * FROM unnest({casts}) AS given({", ".join(columns)}) ORDER BY id) AS given
            CROSS JOIN LATERAL (
                SELECT FROM ledger.ingest_task WHERE id = given.id AND lease_token = :token AND status = 'RUNNING'
                AND (SELECT count(*) FROM lease) >= 0 FOR NO KEY UPDATE) AS task),
        done AS (
            UPDATE ledger.ingest_task task
            SET status = '{transition.to}', lease_token = NULL, updated_at = {_NOW}, {transition.changes}
            FROM held AS given WHERE task.id = given.id AND task.id = ANY(ARRAY(SELECT id FROM held))
            RETURNING task.id, task.type, task.queue, task.priority, task.isolated, task.attempt_count,
                      task.next_retry_at, task.notify, task.error_code, task.error_message, task.partition_key),
        transitions AS (
            INSERT INTO ledger.ingest_task_transition
                (task_id, from_status, to_status, attempt_count, message, actor, created_at)
            SELECT id, 'RUNNING', '{transition.to}', attempt_count, {transition.message}, :actor, {_NOW}
            FROM done {given}),
        ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last),
        {insert_tally("done", transition.result, ids="CAST(:id AS uuid[])")}
        {_finish(transition, frees_keys) if transition.is_final else _WAKE_AGAIN}
    """,
        before="CLOSE celeriac_batch;" if in_batch else "",
    )


# The ids that were changed, or NULL for all of them. That is the usual case, and saves sending every id back.
_IDS: Final = """SELECT CASE WHEN (SELECT count(*) FROM done) < cardinality(CAST(:id AS uuid[]))
                             THEN (SELECT coalesce(array_agg(id), '{}') FROM done) END"""
# A task that is not final gets a wake-up for the time at which it is due.
_WAKE_AGAIN: Final = f""",
        again AS (
            SELECT id, type, queue, priority, isolated, CASE WHEN next_retry_at > at THEN next_retry_at END AS due_at
            FROM done CROSS JOIN clock),
        {wakeups.insert_wakeups("again")}
        {_IDS}, ours FROM wakeups"""
_DEAD_LETTERS: Final = """,
        letters AS (
            INSERT INTO ledger.outbox_event (destination, payload, created_at)
            SELECT :dead_letters, jsonb_build_object('dead', id, 'errorCode', error_code), at
            FROM done CROSS JOIN clock WHERE :dead_letters <> '')"""


def _finish(transition: Transition, frees_keys: bool) -> str:
    """Return the end of the statement for a final outcome.

    It inserts the notification that the submitter asked for, the dead letter of a DEAD task, and, if it frees its
    partition key, a wake-up for the next task of the key (docs/protocol.md, Partition keys).
    """
    letters = _DEAD_LETTERS if transition.to == "DEAD" else ""
    events = f"{letters},{insert_notifications('done', transition.to)}"
    if not frees_keys:
        return f"{events} {_IDS}, '[]'::jsonb"
    return f"{events}, {partition_keys.find_freed('done')}, {wakeups.insert_wakeups('freed')} {_IDS}, ours FROM wakeups"
