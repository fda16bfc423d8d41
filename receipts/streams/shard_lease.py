"""The lease on one shard: one consumer at a time reads it and writes its checkpoints.

The token in the row decides who may write; the ledger's clock decides when another consumer may take the shard over.
A consumer whose lease has expired may go on until that happens. Afterwards every statement of it finds no row, raises
`LeaseLost`, and writes nothing (docs/protocol.md, Lease and fence).

A lease lasts CHECKPOINT_CLAIM_IDLE_MS, which is longer than a checkpoint (interval + drain). So a consumer that renews
it with each checkpoint keeps its shard without a heartbeat, and one that hangs loses it.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from sqlalchemy import Engine, TextClause
from sqlalchemy.exc import SQLAlchemyError

from models.engine import autocommit
from models.errors import CeleriacError, LeaseLost
from models.ledger_outage import wait_for_ledger
from models.sql import sql
from outbox.lease import Db, connection_of
from receipts.streams.consumers import Shard
from receipts.streams.fault_events import FaultEvent, log_event

# take_shard: free, or its lease has expired → leased to this consumer.
TAKE_SHARD: Final = sql("""
    INSERT INTO ledger.shard_lease (stream, shard, holder, lease_token, lease_until)
    VALUES (:stream, :shard, :holder, :token, ledger.ledger_now() + make_interval(secs => :seconds))
    ON CONFLICT (stream, shard) DO UPDATE
    SET holder = excluded.holder, lease_token = excluded.lease_token, lease_until = excluded.lease_until
    WHERE shard_lease.lease_until IS NULL OR shard_lease.lease_until <= (SELECT ledger.ledger_now())
    RETURNING lease_token
""")
_HELD: Final = "stream = :stream AND shard = :shard AND lease_token = :token"
_RENEW: Final = f"""
    UPDATE ledger.shard_lease SET lease_until = (SELECT ledger.ledger_now()) + make_interval(secs => :seconds)
    WHERE {_HELD}
"""
# renew_shard: held under this token → the same, for a full lease from now.
RENEW_SHARD: Final = sql(f"{_RENEW} RETURNING true")
# begin_checkpoint: the same, and draw the id of the next checkpoint.
BEGIN_CHECKPOINT: Final = sql(f"{_RENEW} RETURNING nextval('ledger.checkpoint_id_seq')")
# hold_shard: lock the row, so that no other consumer takes the shard over before the end of this transaction. A process
# that hangs in the transaction is cut off by PostgreSQL after a lease, or the next consumer would wait for it.
HOLD_SHARD: Final = sql(f"""
    SELECT set_config('idle_in_transaction_session_timeout', CAST(round(:seconds * 1000) AS text), true)
    FROM ledger.shard_lease WHERE {_HELD} FOR NO KEY UPDATE
""")
# release_shard: held under this token → free.
RELEASE_SHARD: Final = sql(f"""
    UPDATE ledger.shard_lease SET holder = NULL, lease_token = NULL, lease_until = NULL WHERE {_HELD}
""")


@dataclass(slots=True)
class ShardLease:
    """A shard that this consumer holds."""

    engine: Engine
    shard: Shard
    token: uuid.UUID
    seconds: float
    renewed_at: float  # of `time.monotonic()`, before the renewal was sent

    @classmethod
    def take(cls, engine: Engine, shard: Shard, *, seconds: float) -> ShardLease | None:
        """Return a lease, or None if another consumer holds the shard."""
        lease = cls(engine, shard, uuid.uuid4(), seconds, time.monotonic())
        with autocommit(engine) as connection:
            taken = connection.execute(TAKE_SHARD, {**lease.values, "holder": shard.holder}).first()
        return None if taken is None else lease

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of every statement about this lease."""
        shard = {"stream": self.shard.stream, "shard": self.shard.number}
        return {**shard, "token": self.token, "seconds": self.seconds}

    def begin_checkpoint(self) -> int:
        """Renew the lease and return the id of a new checkpoint."""
        return int(self._renewed(BEGIN_CHECKPOINT))

    def renew(self) -> None:
        """Renew the lease; raise LeaseLost if another consumer has the shard."""
        self._renewed(RENEW_SHARD)

    def check(self) -> None:
        """Raise LeaseLost if the shard is lost. The ledger is asked only if a third of the lease has passed."""
        if time.monotonic() - self.renewed_at > self.seconds / 3:
            self.renew()

    def hold(self, db: Db) -> None:
        """Hold the shard until the transaction of `db` ends; raise LeaseLost if it is lost."""
        if connection_of(db).execute(HOLD_SHARD, self.values).first() is None:
            self.raise_lost()

    def release(self) -> None:
        """Let others take the shard. If the ledger does not answer, they can when the lease has expired."""
        try:
            with autocommit(self.engine) as connection:
                connection.execute(RELEASE_SHARD, self.values)
        except (SQLAlchemyError, CeleriacError) as error:
            reason = str(error).partition("\n")[0]
            log_event(FaultEvent.SHARD_NOT_RELEASED, f"The shard stays leased: {reason}", self.shard)

    def _renewed(self, statement: TextClause) -> Any:
        def execute() -> Any:
            before = time.monotonic()
            with autocommit(self.engine) as connection:
                answer = connection.execute(statement, self.values).scalar()
            self.renewed_at = before
            return answer

        answer = wait_for_ledger(execute, seconds=self.seconds)
        return self.raise_lost() if answer is None else answer

    def raise_lost(self) -> NoReturn:
        name = f"{self.shard.number} of {self.shard.stream}"
        raise LeaseLost(f"Another consumer has the shard {name}; nothing more may be written for it.")
