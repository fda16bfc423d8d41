"""The statements that settle tasks, each with the transition that it makes; `tasks/settle.py` says when.

All of them lock the rows that this token holds, in the order of ids (P14), change them, write their transitions, and
return the ids and the rings that this process must publish.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text

from tasks import rings

_ERRORS: Final = "last_error = given.last_error, error_message = given.error_message, error_code = given.error_code"
_NO_ERRORS: Final = "last_error = NULL, error_message = NULL, error_code = NULL"
_NOW: Final = "(SELECT at FROM clock)"
_LATER: Final = f"{_NOW} + make_interval(secs => given.wait_ms / 1000)"


def _settling(*, arrays: str, to: str, changes: str, message: str, then: str, and_held: str = "") -> TextClause:
    """RUNNING under this token → `to`. `arrays` are further columns, one value per id: "name type, name type"."""
    columns = [("id", "uuid"), *((pair.split()[0], pair.split()[1]) for pair in arrays.split(", ") if pair)]
    casts = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    return text(f"""
        WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
        given AS MATERIALIZED (SELECT * FROM unnest({casts}) AS given({names})),
        held AS MATERIALIZED (
            SELECT id FROM ingest_task
            WHERE id IN (SELECT id FROM given) AND lease_token = :token AND status = 'RUNNING'{and_held}
            ORDER BY id FOR NO KEY UPDATE),
        done AS (
            UPDATE ingest_task task
            SET status = '{to}', lease_token = NULL, updated_at = (SELECT at FROM clock), {changes}
            FROM held JOIN given USING (id) WHERE task.id = held.id
            RETURNING task.id, task.type, task.queue, task.priority, task.isolated, task.attempt_count,
                      task.next_retry_at, task.notify, task.error_code, task.error_message),
        told AS (
            INSERT INTO ingest_task_transition
                (task_id, from_status, to_status, attempt_count, message, actor, created_at)
            SELECT id, 'RUNNING', '{to}', attempt_count, {message}, :actor, at FROM done CROSS JOIN clock),
        ended AS (DELETE FROM task_lease WHERE token = :token AND :is_last){then}
    """)


def _final(status: str) -> str:
    """Whoever asked to be notified is told the final status."""
    return f""",
        notified AS (
            INSERT INTO outbox_event (destination, payload, created_at)
            SELECT notify, jsonb_build_object('taskId', id, 'type', type, 'status', '{status}',
                                              'attemptCount', attempt_count, 'errorMessage', error_message), at
            FROM done CROSS JOIN clock WHERE notify IS NOT NULL)"""


_IDS: Final = "SELECT (SELECT array_agg(id) FROM done)"
_RUNG: Final = f""",
        again AS (
            SELECT id, type, queue, priority, isolated, CASE WHEN next_retry_at > at THEN next_retry_at END AS due_at
            FROM done CROSS JOIN clock),
        {rings.rung("again")}
        {_IDS}, ours FROM rings"""

SUCCEED: Final = _settling(
    arrays="result text",
    to="SUCCEEDED",
    changes=f"finished_at = (SELECT at FROM clock), next_retry_at = NULL, {_NO_ERRORS}, "
    "result = CAST(given.result AS jsonb)",
    message="NULL",
    then=f"{_final('SUCCEEDED')} {_IDS}, '[]'::jsonb",
    # still in the transaction that the batch began: a handler that ended it has its effects and no SUCCEEDED (P3)
    and_held=" AND (CAST(:batch AS text) IS NULL OR current_setting('celeriac.batch', true) = :batch)",
)
DISCARD: Final = _settling(
    arrays="why text",
    to="DISCARDED",
    changes=f"finished_at = (SELECT at FROM clock), {_NO_ERRORS}",
    message="(SELECT why FROM given WHERE given.id = done.id)",
    then=f"{_final('DISCARDED')} {_IDS}, '[]'::jsonb",
)
RETRY: Final = _settling(
    arrays="wait_ms float8, last_error text, error_message text, error_code text",
    to="RETRYING",
    changes=f"attempt_count = task.attempt_count + 1, {_ERRORS}, next_retry_at = {_LATER}, rung_at = {_LATER}",
    message="error_message",
    then=_RUNG,
)
SNOOZE: Final = _settling(
    arrays="wait_ms float8",
    to="RETRYING",
    changes=f"next_retry_at = {_LATER}, rung_at = {_LATER}",
    message="'snoozed'",
    then=_RUNG,
)
# isolate: its batch was lost with it in it, so it runs alone next time; no attempt is burned (P5).
ISOLATE: Final = _settling(
    arrays="why text",
    to="RETRYING",
    changes=f"isolated = true, next_retry_at = {_NOW}, rung_at = {_NOW}",
    message="(SELECT why FROM given WHERE given.id = done.id)",
    then=_RUNG,
)
RELEASE: Final = _settling(
    arrays="why text",
    to="QUEUED",
    changes="rung_at = (SELECT at FROM clock)",
    message="(SELECT why FROM given WHERE given.id = done.id)",
    then=_RUNG,
)
DEAD: Final = _settling(
    arrays="last_error text, error_message text, error_code text",
    to="DEAD",
    changes=f"attempt_count = task.attempt_count + 1, {_ERRORS}, next_retry_at = NULL,"
    " finished_at = (SELECT at FROM clock)",
    message="error_message",
    then=f""",
        lettered AS (
            INSERT INTO outbox_event (destination, payload, created_at)
            SELECT :dead_letters, jsonb_build_object('dead', id, 'errorCode', error_code), at
            FROM done CROSS JOIN clock WHERE :dead_letters <> ''){_final("DEAD")}
        {_IDS}, '[]'::jsonb""",
)

# begin_batch: what SUCCEED compares with; it ends with the transaction.
BEGIN_BATCH: Final = text("SELECT set_config('celeriac.batch', :batch, true)")

# audit: what a holder was refused.
AUDIT: Final = text("""
    INSERT INTO task_audit (task_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id, concat_ws('; ', CAST(:detail AS text), coalesce('now ' || task.status, 'gone'))
    FROM unnest(CAST(:id AS uuid[])) AS given(id) LEFT JOIN ingest_task task USING (id)
""")
