"""The statements about `checkpoint`: one row per checkpoint, which is written when the checkpoint is decided.

    (no row)  ──write──►  sink_committed = false  ──mark_committed──►  sink_committed = true

Without a row, the entries are read again and what their handlers wrote is aborted. With a row, the checkpoint is
committed, by the consumer that wrote it or by the next one: the row has all that a sink needs for that. The decision to
commit the transactions of two-phase sinks is in the same ledger transaction as the row.

    offsets  {"ids": [ids of the entries]}            they are acknowledged when the row says sink_committed
    state    {"handler": {…}, "sinks": {name: {…}}}   the state of the handler, and the handle of each sink

Every statement names the token of the shard. A row is deleted when a later one of its shard is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg2 import extensions
from sqlalchemy import Engine

from failpoint import failpoint
from models.engine import autocommit
from models.guarded_session import ENDED_BY_FUNCTION, GuardedSession, TransactionFailed, TransactionMisused
from models.ledger_outage import REPETITIONS, asks_to_repeat, is_outage, wait_for_ledger
from models.sql import sql
from outbox.canonical_json import canonical_json
from receipts.streams.consumers import Shard
from receipts.streams.shard_lease import ShardLease

_HELD: Final = """
    SELECT FROM ledger.shard_lease WHERE stream = :stream AND shard = :shard AND lease_token = :token
"""
# write_checkpoint: → decided. The transaction holds the shard.
WRITE: Final = sql("""
    INSERT INTO ledger.checkpoint (id, stream, shard, offsets, state, created_at) OVERRIDING SYSTEM VALUE
    VALUES (:id, :stream, :shard, CAST(:offsets AS jsonb), CAST(:state AS jsonb), (SELECT ledger.ledger_now()))
""")
# mark_committed: decided → sink_committed, and older rows of the shard are deleted. No row: the shard is lost.
MARK_COMMITTED: Final = sql(f"""
    WITH older AS (
        DELETE FROM ledger.checkpoint
        WHERE stream = :stream AND shard = :shard AND id < :id AND sink_committed AND EXISTS ({_HELD}))
    UPDATE ledger.checkpoint SET sink_committed = true, completed_at = (SELECT ledger.ledger_now())
    WHERE id = :id AND EXISTS ({_HELD})
    RETURNING id
""")
NEWEST: Final = sql("""
    SELECT id, offsets, state, sink_committed FROM ledger.checkpoint
    WHERE stream = :stream AND shard = :shard ORDER BY id DESC LIMIT 1
""")
EXISTS: Final = sql("SELECT EXISTS (SELECT FROM ledger.checkpoint WHERE id = :id)")
# store_handle: → open and undecided, if the shard is held under this token. No row: the shard is lost.
STORE_HANDLE: Final = sql("""
    WITH held AS MATERIALIZED (
        SELECT FROM ledger.shard_lease WHERE stream = :stream AND shard = :shard AND lease_token = :token
        FOR NO KEY UPDATE)
    INSERT INTO ledger.sink_transaction AS stored (gid, checkpoint_id, sink, handle, lease_token, created_at)
    SELECT :gid, :id, :sink, CAST(:handle AS jsonb), CAST(:token AS uuid), (SELECT ledger.ledger_now()) FROM held
    ON CONFLICT (gid) DO UPDATE SET handle = stored.handle
    RETURNING gid
""")
Write = Callable[[GuardedSession], object]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been decided, or is about to be."""

    id: int
    entry_ids: Sequence[str]
    state: dict[str, Any] = field(default_factory=dict)
    handles: Mapping[str, Any] = field(default_factory=dict)
    sink_committed: bool = False


def newest(engine: Engine, shard: Shard) -> Checkpoint | None:
    """Return the last checkpoint of a shard. It is the only one that may not be committed or acknowledged."""
    with autocommit(engine) as connection:
        row = connection.execute(NEWEST, {"stream": shard.stream, "shard": shard.number}).first()
    if row is None:
        return None
    return Checkpoint(row.id, row.offsets["ids"], row.state["handler"], row.state["sinks"], row.sink_committed)


def write(lease: ShardLease, checkpoint: Checkpoint, writes: Sequence[Write], *, with_row: bool) -> None:
    """Decide the checkpoint: execute `writes` and insert its row, in one transaction that holds the shard.

    If the answer of the ledger was lost, the ledger is asked whether the row is there. Without a row there is nothing
    to ask for, so the error is raised, and the entries are consumed once more.
    """
    all_writes = [*writes, _inserting(lease, checkpoint)] if with_row else writes
    repetitions = 0
    while True:
        try:
            return _write(lease, all_writes)
        except Exception as error:
            repetitions += asks_to_repeat(error)
            if not with_row or not (is_outage(error) or 0 < repetitions <= REPETITIONS):
                raise
            if _is_written(lease, checkpoint.id):
                return None


def mark_committed(lease: ShardLease, checkpoint_id: int) -> None:
    """Record that every sink has committed, or raise LeaseLost."""

    def execute() -> Any:
        with autocommit(lease.engine) as connection:
            return connection.execute(MARK_COMMITTED, {**lease.values, "id": checkpoint_id}).first()

    if wait_for_ledger(execute, seconds=lease.seconds) is None:
        lease.raise_lost()


def store_handle(lease: ShardLease, checkpoint_id: int, *, gid: str, sink: str, handle: Mapping[str, Any]) -> None:
    """Store the handle of a transaction before it is prepared, or raise LeaseLost."""
    values = {**lease.values, "id": checkpoint_id, "gid": gid, "sink": sink, "handle": canonical_json(dict(handle))}

    def execute() -> Any:
        with autocommit(lease.engine) as connection:
            return connection.execute(STORE_HANDLE, values).first()

    if wait_for_ledger(execute, seconds=lease.seconds) is None:
        lease.raise_lost()


def _write(lease: ShardLease, writes: Sequence[Write]) -> None:
    db = GuardedSession(lease.engine)
    try:
        lease.hold(db)
        driver: Any = db.connection().connection.dbapi_connection
        for each in writes:
            each(db)
            db.flush()
            match driver.get_transaction_status():
                case extensions.TRANSACTION_STATUS_INERROR:
                    raise TransactionFailed
                case extensions.TRANSACTION_STATUS_IDLE:
                    raise TransactionMisused(ENDED_BY_FUNCTION)  # what follows would commit by itself
        failpoint("checkpoint.before_commit_of_row")
        db.commit_as_owner()
    finally:
        db.end()


def _inserting(lease: ShardLease, checkpoint: Checkpoint) -> Write:
    state = canonical_json(checkpoint.state, what="state of the consumer")
    values = {
        **lease.values,
        "id": checkpoint.id,
        "offsets": json.dumps({"ids": list(checkpoint.entry_ids)}),
        "state": f'{{"handler": {state}, "sinks": {json.dumps(dict(checkpoint.handles), ensure_ascii=False)}}}',
    }
    return lambda db: db.execute(WRITE, values)


def _is_written(lease: ShardLease, checkpoint_id: int) -> bool:
    """Return whether the row was committed. Renewing the lease waits for a transaction that still holds the shard."""
    lease.renew()

    def ask() -> bool:
        with autocommit(lease.engine) as connection:
            return bool(connection.execute(EXISTS, {"id": checkpoint_id}).scalar())

    return wait_for_ledger(ask, seconds=lease.seconds)
