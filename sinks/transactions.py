"""The statements about `sink_transaction`: the handle of each transaction, the decision, and what the sink has done.

    (no row)  ──store_handles──►  open, undecided  ──decide_commit──►  prepared, commit  ──finish──►  committed
                                                   ──decide_abort───►  open, abort       ──finish──►  aborted

A decision never changes: both statements that decide require that there is none. `decide_commit` runs in the
transaction that writes SUCCEEDED, under the same token. Recovery decides `abort` only when the task no longer has the
token of the attempt, so the two never compete for an attempt that may still succeed.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from models.driver_values import array
from models.engine import Bind, autocommit, engine
from models.errors import LeaseLost
from models.ledger_outage import wait_for_ledger
from models.prepared_statements import Prepared
from models.sql import sql
from outbox.canonical_json import canonical_json
from outbox.lease import Db, connection_of
from sinks.contract import Effect, EffectState

# store_handles: → open and undecided, if the task is RUNNING under this token. No row means that the lease is lost.
STORE_HANDLES: Final = Prepared("""
    WITH held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = :task_id AND lease_token = CAST(:token AS uuid)
          AND status = 'RUNNING' FOR NO KEY UPDATE)
    INSERT INTO ledger.sink_transaction AS stored (gid, task_id, sink, handle, lease_token, created_at)
    SELECT gid, held.id, sink, CAST(handle AS jsonb), CAST(:token AS uuid), (SELECT ledger.ledger_now())
    FROM held CROSS JOIN unnest(CAST(:gids AS text[]), CAST(:sinks AS text[]), CAST(:handles AS text[]))
                         AS given(gid, sink, handle)
    ORDER BY gid
    ON CONFLICT (gid) DO UPDATE SET handle = stored.handle
    RETURNING gid
""")
# decide_commit: undecided under this token → commit. Runs in the transaction that writes SUCCEEDED.
DECIDE_COMMIT: Final = Prepared("""
    UPDATE ledger.sink_transaction
    SET decision = 'commit', decided_at = (SELECT ledger.ledger_now()), state = 'prepared'
    WHERE gid = ANY(CAST(:gids AS text[])) AND lease_token = :token AND decision IS NULL
    RETURNING gid
""")
# decide_abort: undecided → abort.
DECIDE_ABORT: Final = sql("""
    UPDATE ledger.sink_transaction SET decision = 'abort', decided_at = (SELECT ledger.ledger_now())
    WHERE gid = ANY(CAST(:gids AS text[])) AND decision IS NULL
""")
# abort_orphans: undecided, and the task no longer has the token of the attempt → abort. A transaction that is being
# settled is locked or already decided, and its task still has the token in our snapshot. For the transaction of a
# checkpoint, no shard has the token, or the lease of the shard has expired: its consumer may not exist any more, and
# if it goes on after all, it finds the decision and consumes the entries once more.
ABORT_ORPHANS: Final = sql("""
    WITH orphan AS MATERIALIZED (
        SELECT gid FROM ledger.sink_transaction AS transaction
        WHERE decision IS NULL AND state NOT IN ('committed', 'aborted')
          AND CASE WHEN task_id IS NOT NULL THEN NOT EXISTS (
            SELECT FROM ledger.ingest_task task
            WHERE task.id = transaction.task_id AND task.lease_token = transaction.lease_token)
          ELSE NOT EXISTS (
            SELECT FROM ledger.shard_lease shard
            WHERE shard.lease_token = transaction.lease_token AND shard.lease_until > (SELECT ledger.ledger_now())) END
        ORDER BY gid FOR UPDATE SKIP LOCKED)
    UPDATE ledger.sink_transaction AS transaction SET decision = 'abort', decided_at = (SELECT ledger.ledger_now())
    FROM orphan WHERE transaction.gid = orphan.gid AND decision IS NULL
""")
DECISIONS: Final = sql("SELECT gid, decision FROM ledger.sink_transaction WHERE gid = ANY(CAST(:gids AS text[]))")
# finish: decided → the sink has obeyed. Need not survive a crash of PostgreSQL: recovery would find the same again.
FINISH: Final = sql("""
    WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
    UPDATE ledger.sink_transaction
    SET state = CASE WHEN decision = 'commit' THEN 'committed' ELSE 'aborted' END
    FROM relaxed WHERE gid = ANY(CAST(:gids AS text[])) AND decision IS NOT NULL
""")
# fail: decided → an operator must look.
FAIL: Final = sql("UPDATE ledger.sink_transaction SET state = 'failed' WHERE gid = :gid AND decision IS NOT NULL")
# unfinished: what recovery has to do, oldest first.
UNFINISHED: Final = sql("""
    SELECT gid, sink, handle, decision, (SELECT ledger.ledger_now()) - created_at AS age, state
    FROM ledger.sink_transaction WHERE state NOT IN ('committed', 'aborted') ORDER BY created_at, gid LIMIT :most
""")
OF_TASK: Final = sql("""
    SELECT state FROM ledger.sink_transaction WHERE task_id = :task_id AND sink = :sink AND decision = 'commit'
""")
# unfinished_of_key: transactions of earlier tasks of the same partition key that the sink has yet to commit.
UNFINISHED_OF_KEY: Final = sql("""
    SELECT transaction.gid, transaction.handle
    FROM ledger.sink_transaction AS transaction JOIN ledger.ingest_task task ON task.id = transaction.task_id
    WHERE transaction.state NOT IN ('committed', 'aborted') AND transaction.decision = 'commit'
      AND transaction.sink = :sink AND task.partition_key = :partition_key
    ORDER BY task.key_seq
""")
# prune: finished → deleted, after its task; after a week if it is of a checkpoint: until then, recovery can roll back
# what a consumer prepared after it had lost its shard.
PRUNE: Final = sql("""
    DELETE FROM ledger.sink_transaction
    WHERE state IN ('committed', 'aborted') AND gid IN (
        SELECT gid FROM ledger.sink_transaction AS transaction
        WHERE state IN ('committed', 'aborted')
          AND NOT EXISTS (SELECT FROM ledger.ingest_task task WHERE task.id = transaction.task_id)
          AND (task_id IS NOT NULL OR decided_at < (SELECT ledger.ledger_now()) - interval '7 days')
        LIMIT :most)
""")


@dataclass(frozen=True, slots=True)
class UnfinishedTransaction:
    """A transaction that has no decision, or whose sink has not obeyed yet."""

    gid: str
    sink: str
    handle: dict[str, Any]
    decision: str | None
    age: timedelta
    state: str


def store_handles(
    bind: Bind, task_id: uuid.UUID, token: uuid.UUID, handles: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> None:
    """Store gid → (sink, handle), or raise LeaseLost."""
    values = {
        "task_id": task_id,
        "token": token,
        "gids": array(handles),
        "sinks": array(sink for sink, _ in handles.values()),
        "handles": array(canonical_json(dict(handle)) for _, handle in handles.values()),
    }
    if len(_ask(bind, STORE_HANDLES, values)) < len(handles):
        raise LeaseLost


def decide_commit(db: Db, gids: Collection[str], token: uuid.UUID) -> None:
    """Decide in the transaction of `db`, which also writes SUCCEEDED; raise LeaseLost if one is aborted already."""
    found = DECIDE_COMMIT.rows(connection_of(db), {"gids": array(gids), "token": token})
    if len(found) < len(gids):
        raise LeaseLost


def decide_abort(bind: Bind, gids: Collection[str], *, seconds: float = math.inf) -> None:
    """Decide that these transactions are aborted, unless there is a decision."""
    _ask(bind, DECIDE_ABORT, {"gids": array(gids)}, seconds=seconds)


def decisions(bind: Bind, gids: Collection[str], *, seconds: float = math.inf) -> dict[str, str | None]:
    """Return the decision on each of these transactions that has a handle."""
    return dict(_ask(bind, DECISIONS, {"gids": array(gids)}, seconds=seconds)) if gids else {}


def finish(bind: Bind, gids: Collection[str], *, seconds: float = math.inf) -> None:
    """Record that the sinks have obeyed."""
    if gids:
        _ask(bind, FINISH, {"gids": array(gids)}, seconds=seconds)


def unfinished(connection: Connection, *, most: int = 10_000) -> list[UnfinishedTransaction]:
    return [UnfinishedTransaction(*row) for row in connection.execute(UNFINISHED, {"most": most})]


def unfinished_of_key(bind: Bind, sink: str, partition_key: str) -> list[tuple[str, dict[str, Any]]]:
    return _ask(bind, UNFINISHED_OF_KEY, {"sink": sink, "partition_key": partition_key})


def prune(db: Session, *, most: int = 1000) -> None:
    """Delete finished transactions of pruned tasks."""
    db.execute(PRUNE, {"most": most})


def effects_by_decision(sink: str, task_id: uuid.UUID) -> Sequence[Effect]:
    """Return the effects of a task in a two-phase sink: those that the ledger has decided to commit."""
    with engine().connect() as connection:
        states = connection.execute(OF_TASK, {"task_id": task_id, "sink": sink}).scalars().all()
    return [
        Effect(sink, EffectState.COMMITTED, detail="visible" if state == "committed" else "pending: not visible yet")
        for state in states
    ]


def _ask(bind: Bind, statement: Any, values: Mapping[str, Any], *, seconds: float = math.inf) -> list[Any]:
    """Execute a statement that may be repeated; wait for an unreachable ledger."""

    def execute() -> list[Any]:
        with autocommit(bind) as connection:
            if isinstance(statement, Prepared):
                return list(statement.rows(connection, values))
            found = connection.execute(statement, values)
            return [tuple(row) for row in found] if found.returns_rows else []

    return wait_for_ledger(execute, seconds=seconds)
