"""How sinks take part in a checkpoint: each collects effects, and makes them visible when the checkpoint is decided.

    the handler writes       through `writer`; no one else sees it
    on_checkpoint_start      no more writes: prepare; return the handle, with which another process could commit
    write(db)                in the ledger transaction that decides the checkpoint
    on_checkpoint_complete   the checkpoint is decided: make the effects visible. It may be called again
    on_checkpoint_abort      the checkpoint will never be decided: forget the effects
    on_checkpoint_restore    another process has decided the checkpoint: take its handle; complete follows

The entries of the checkpoint are acknowledged after `on_checkpoint_complete` of every sink, never before.

    atomic, at_least_once (outbox)   written by `write`: they commit together with the checkpoint
    two_phase                        prepared before the decision, which is made by `write`
    keyed (Redis list), script       collected in the handle; appended by key on completion (`checkpointed_lists.py`)
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.orm import Session

from failpoint import failpoint
from models.guarded_session import GuardedSession
from receipts.streams import checkpoint_rows
from receipts.streams.consumers import Shard
from receipts.streams.shard_lease import ShardLease
from sinks import transactions
from sinks.configuration import open_sinks
from sinks.contract import SinkNotReady
from sinks.ledger import LedgerSink
from sinks.two_phase import Finished, TwoPhaseCommitSink, gid_prefix

logger = logging.getLogger(__name__)

Handle = dict[str, Any]
OBEYED: Final = (Finished.DONE, Finished.ALREADY_DONE)
ABORT_SECONDS: Final = 3.0  # how long an abort waits for the ledger before it is left to recovery


@dataclass(slots=True)
class OpenCheckpoint:
    """The checkpoint that a consumer is collecting: what its sinks need to know about it."""

    shard: Shard
    lease: ShardLease
    id: int = 0


class CheckpointAwareSink(ABC):
    """A sink whose effects become visible at a checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def writer(self) -> Any:
        """The object with which a handler writes."""

    @abstractmethod
    def on_checkpoint_start(self, checkpoint_id: int, /) -> Handle | None:
        """Prepare what was written; return the handle as JSON, or None if there is nothing to complete."""

    @abstractmethod
    def write(self, db: GuardedSession) -> None:
        """Write in the transaction that decides the checkpoint. It is called again if that has to be repeated."""

    @abstractmethod
    def on_checkpoint_complete(self, checkpoint_id: int, /) -> None:
        """Make the effects visible; return normally only if they are. May be called again for the same checkpoint."""

    @abstractmethod
    def on_checkpoint_abort(self, checkpoint_id: int, /) -> None:
        """Forget what was written."""

    @abstractmethod
    def on_checkpoint_restore(self, checkpoint_id: int, handle: Handle, /) -> None:
        """Take the handle of a checkpoint that another process has decided and perhaps completed."""


class LedgerInCheckpoint(CheckpointAwareSink):
    """The ledger's own database, or the outbox: the effects commit together with the checkpoint."""

    def __init__(self, sink: LedgerSink, checkpoint: OpenCheckpoint) -> None:
        super().__init__(sink.name)
        self.checkpoint = checkpoint
        self._writer = sink.bind(self)
        self._deferred: list[Callable[[Session], object]] = []

    @property
    def writer(self) -> Any:
        return self._writer

    def check_lease(self) -> None:
        self.checkpoint.lease.check()

    def defer(self, write: Callable[[Session], object]) -> None:
        self._deferred.append(write)

    def on_checkpoint_start(self, _checkpoint_id: int, /) -> Handle | None:
        return None

    def write(self, db: GuardedSession) -> None:
        for each in self._deferred:
            each(db)

    def on_checkpoint_complete(self, _checkpoint_id: int, /) -> None:
        self._deferred.clear()

    def on_checkpoint_abort(self, _checkpoint_id: int, /) -> None:
        self._deferred.clear()

    def on_checkpoint_restore(self, _checkpoint_id: int, _handle: Handle, /) -> None:
        """Do nothing: what was written committed with the checkpoint."""


class TwoPhaseInCheckpoint(CheckpointAwareSink):
    """A two-phase sink: one transaction per checkpoint."""

    def __init__(self, sink: TwoPhaseCommitSink[Any, Any], checkpoint: OpenCheckpoint) -> None:
        super().__init__(sink.name)
        self.sink = sink
        self.checkpoint = checkpoint
        self._txn: Any = None
        self._handle: Handle | None = None  # stored in the ledger

    @property
    def writer(self) -> Any:
        return self.sink.bind(self)

    def check_lease(self) -> None:
        self.checkpoint.lease.check()

    def transaction(self, sink: TwoPhaseCommitSink[Any, Any]) -> Any:
        """Return the transaction of the checkpoint. The first call begins it."""
        if self._txn is None:
            self._txn = sink.begin_transaction(self._gid)
        return self._txn

    def on_checkpoint_start(self, checkpoint_id: int, /) -> Handle | None:
        if self._txn is None:
            return None
        failpoint("checkpoint.before_handle")
        handle = dict(self._txn.handle)
        self._handle = {"gid": self._gid, "handle": handle}
        checkpoint_rows.store_handle(self.checkpoint.lease, checkpoint_id, gid=self._gid, sink=self.name, handle=handle)
        failpoint("checkpoint.after_handle")
        self.sink.pre_commit(self._txn)
        failpoint("checkpoint.after_prepare")
        return self._handle

    def write(self, db: GuardedSession) -> None:
        if self._handle is not None:
            transactions.decide_commit(db, [self._handle["gid"]], self.checkpoint.lease.token)

    def on_checkpoint_complete(self, checkpoint_id: int, /) -> None:
        if self._handle is None:
            return
        if self._txn is not None:
            done = self.sink.commit(self._txn)
        else:
            done = self.sink.recover_and_commit(self._handle["handle"])
        if done not in OBEYED:
            raise SinkNotReady(f"The sink {self.name} has not committed the checkpoint {checkpoint_id}: {done}.")
        transactions.finish(self.checkpoint.lease.engine, [self._handle["gid"]])
        self._txn = self._handle = None

    def on_checkpoint_abort(self, _checkpoint_id: int, /) -> None:
        """Abort, unless the ledger has decided to commit after all. Without its answer, recovery finishes it."""
        txn, handle, self._txn, self._handle = self._txn, self._handle, None, None
        if txn is None:
            return
        try:
            if handle is None or self._decides_abort(handle["gid"]):
                done = self.sink.abort(txn)
                if handle is not None and done in OBEYED:
                    transactions.finish(self.checkpoint.lease.engine, [handle["gid"]], seconds=ABORT_SECONDS)
        except Exception as error:  # client libraries raise many kinds
            logger.warning(
                "Sink %s: left to recovery: %s",
                self.name,
                str(error).partition("\n")[0],
                extra={"event": "sink_left_to_recovery", "sink": self.name},
            )

    def on_checkpoint_restore(self, _checkpoint_id: int, handle: Handle, /) -> None:
        self._handle = handle

    @property
    def _gid(self) -> str:
        """The name of the transaction in the sink. The token makes it unique for each attempt."""
        installation, token = open_sinks().installation(), self.checkpoint.lease.token
        return f"{gid_prefix(installation)}checkpoint-{self.checkpoint.id}:{token.hex}:{self.name}"

    def _decides_abort(self, gid: str) -> bool:
        engine = self.checkpoint.lease.engine
        transactions.decide_abort(engine, [gid], seconds=ABORT_SECONDS)
        return transactions.decisions(engine, [gid], seconds=ABORT_SECONDS).get(gid) != "commit"
