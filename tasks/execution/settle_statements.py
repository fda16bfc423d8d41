"""The statements that settle tasks: one template, a row of `TRANSITIONS` for each outcome; `settle.py` says when.

All of them lock the rows that this token holds, in the order of ids (P14), change them, write their transitions, and
return the ids and the wake-ups that this process must publish. The last one of a lease ends it: it locks the lease
first, as reclaim does, so that the two never wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from models.prepared_statements import Prepared
from models.sql import sql
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import insert_notifications
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded

_NOW: Final = "(SELECT at FROM clock)"
_LATER: Final = f"{_NOW} + make_interval(secs => given.wait_ms / 1000)"
_FAILED: Final = """attempt_count = task.attempt_count + 1, last_error = given.last_error,
                error_message = given.error_message, error_code = given.error_code"""
_NO_ERROR: Final = "last_error = NULL, error_message = NULL, error_code = NULL"
_ERROR_COLUMNS: Final = {"last_error": "text", "error_message": "text", "error_code": "text"}


@dataclass(frozen=True, slots=True)
class Transition:
    """RUNNING under a token → `to`. `columns` are arrays with a value for each task; `message` is for its history."""

    to: str
    columns: dict[str, str]  # name → type
    changes: str
    message: str = "given.why"
    is_final: bool = False  # else it writes a wake-up


TRANSITIONS: Final[dict[type[Outcome], Transition]] = {
    Succeeded: Transition(
        "SUCCEEDED",
        {"result": "text"},
        f"finished_at = {_NOW}, next_retry_at = NULL, {_NO_ERROR}, result = CAST(given.result AS jsonb)",
        message="NULL",
        is_final=True,
    ),
    Discarded: Transition("DISCARDED", {"why": "text"}, f"finished_at = {_NOW}, {_NO_ERROR}", is_final=True),
    Dead: Transition(
        "DEAD",
        _ERROR_COLUMNS,
        f"{_FAILED}, next_retry_at = NULL, finished_at = {_NOW}",
        message="error_message",
        is_final=True,
    ),
    Retry: Transition(
        "RETRYING",
        {"wait_ms": "float8", **_ERROR_COLUMNS},
        f"{_FAILED}, next_retry_at = {_LATER}, last_wakeup_at = {_LATER}",
        message="error_message",
    ),
    Snoozed: Transition(
        "RETRYING", {"wait_ms": "float8", "why": "text"}, f"next_retry_at = {_LATER}, last_wakeup_at = {_LATER}"
    ),
    # Its batch was lost with it in it, so it runs alone next time; this does not count as an attempt (P5).
    Isolated: Transition(
        "RETRYING", {"why": "text"}, f"isolated = true, next_retry_at = {_NOW}, last_wakeup_at = {_NOW}"
    ),
    Released: Transition("QUEUED", {"why": "text"}, f"last_wakeup_at = {_NOW}"),
}

# begin_batch: a COMMIT reads a cursor WITH HOLD to its end. This one cannot be read, so a COMMIT before settling has
# closed it fails and rolls everything back. After a ROLLBACK, settling finds no cursor to close and fails, too.
BEGIN_BATCH: Final = sql("""
    DECLARE celeriac_batch NO SCROLL CURSOR WITH HOLD FOR
    SELECT CAST(concat('a handler does not end the transaction that it was given') AS integer)
""")
NO_SUCH_CURSOR: Final = "34000"

# check_deferred: what a COMMIT would find, without one; afterwards constraints are as deferred as they were.
CHECK_DEFERRED: Final = sql("""
    SAVEPOINT celeriac_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO celeriac_check; RELEASE celeriac_check
""")

# audit: what a holder was refused; the lease ends here if nothing is left to be settled.
AUDIT: Final = sql("""
    WITH ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last)
    INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id, coalesce('now ' || task.status, 'gone')
    FROM unnest(CAST(:id AS uuid[])) AS given(id) LEFT JOIN ledger.ingest_task task USING (id)
""")


@cache
def settling(outcome: Any, *, frees_keys: bool = False, in_batch: bool = False) -> Prepared:
    """The statement for one outcome. `frees_keys`: it wakes the next tasks of partition keys; `in_batch`: it closes the
    cursor of `BEGIN_BATCH`.

    LATERAL and ANY make the planner look rows up by their ids, whatever it believes of the size of the table.
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
        told AS (
            INSERT INTO ledger.ingest_task_transition
                (task_id, from_status, to_status, attempt_count, message, actor, created_at)
            SELECT id, 'RUNNING', '{transition.to}', attempt_count, {transition.message}, :actor, {_NOW}
            FROM done {given}),
        ended AS (DELETE FROM ledger.task_lease WHERE token = :token AND :is_last)
        {_final(transition, frees_keys) if transition.is_final else _AWAKE}
    """,
        before="CLOSE celeriac_batch;" if in_batch else "",
    )


# NULL: all of them, as nearly always; a thousand ids need not travel to say so.
_IDS: Final = """SELECT CASE WHEN (SELECT count(*) FROM done) < cardinality(CAST(:id AS uuid[]))
                             THEN (SELECT coalesce(array_agg(id), '{}') FROM done) END"""
# A task that is not final is woken when it is due.
_AWAKE: Final = f""",
        again AS (
            SELECT id, type, queue, priority, isolated, CASE WHEN next_retry_at > at THEN next_retry_at END AS due_at
            FROM done CROSS JOIN clock),
        {wakeups.insert_wakeups("again")}
        {_IDS}, ours FROM wakeups"""
_LETTERS: Final = """,
        lettered AS (
            INSERT INTO ledger.outbox_event (destination, payload, created_at)
            SELECT :dead_letters, jsonb_build_object('dead', id, 'errorCode', error_code), at
            FROM done CROSS JOIN clock WHERE :dead_letters <> '')"""


def _final(transition: Transition, frees_keys: bool) -> str:
    """A final task is notified, a dead one has its dead letter, and the next of its partition key is woken (P9)."""
    letters = _LETTERS if transition.to == "DEAD" else ""
    told = f"{letters},{insert_notifications('done', transition.to)}"
    if not frees_keys:
        return f"{told} {_IDS}, '[]'::jsonb"
    return f"{told}, {partition_keys.find_freed('done')}, {wakeups.insert_wakeups('freed')} {_IDS}, ours FROM wakeups"
