"""Two-phase commit: the ledger coordinates, and a transaction without its decision is aborted (presumed abort).

    begin_transaction   when the handler first writes to the sink
    invoke              each write; invisible to everyone else
    (the handle)        stored in `sink_transaction`, durably, when the handler has returned
    pre_commit          the sink promises that it can commit, whatever happens
    (the decision)      `commit` and SUCCEEDED, in one transaction of the ledger: this is the commit point
    commit              makes the writes visible

The name of a transaction (gid) contains the installation, the task and the lease token, so it is unique for each
attempt, and recovery never touches the transactions of another installation.

    died before the handle was stored   the sink loses the transaction with its connection, or recovery removes it
    died before the decision            recovery decides `abort`, once the token of the attempt is gone
    died after the decision             recovery commits; a transaction that is gone was committed already
    prepared after it was aborted       recovery finds it in the sink's own list and rolls it back, however late
    unknown to the ledger               never touched; `manage.py recover` and the log report it

See docs/protocol.md, Two-phase. `recovery.py` is the recovery, `transactions.py` has the statements of the ledger.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import settings
from sinks import transactions
from sinks.contract import Effect, Guarantee, Sink

PREFIX: Final = "celeriac"
T = TypeVar("T")


class Transaction(Protocol):
    """A transaction of a sink that this process has open."""

    @property
    def gid(self) -> str: ...

    @property
    def handle(self) -> dict[str, Any]:
        """Return what recovery needs to finish the transaction in another process, as JSON."""
        ...


Txn = TypeVar("Txn", bound=Transaction)


class Finished(StrEnum):
    """What became of the order to commit or to abort a prepared transaction."""

    DONE = "done"
    ALREADY_DONE = "already_done"
    RETRY_LATER = "retry_later"
    FAILED = "failed"  # and it is known that it cannot succeed
    UNKNOWN = "unknown"  # the sink gave an answer that we do not understand; an operator must look


class TwoPhaseCommitSink(Sink, Generic[T, Txn]):
    """A sink that can prepare writes, and commit or abort them later, in another process if necessary.

    `commit`, `abort` and both `recover_…` may be called twice. They must not raise because the work is already done.
    """

    guarantee: ClassVar[Guarantee] = Guarantee.TWO_PHASE

    @abstractmethod
    def begin_transaction(self, checkpoint_id: str) -> Txn:
        """Begin. The id names this transaction in the sink for ever; for a task it is the gid of the attempt."""

    @abstractmethod
    def invoke(self, value: T, txn: Txn) -> Any:
        """Write, so that only this transaction sees it."""

    @abstractmethod
    def pre_commit(self, txn: Txn) -> None:
        """Make the writes durable, so that `commit` can only fail for a time. Raise if that is impossible."""

    @abstractmethod
    def commit(self, txn: Txn) -> Finished:
        """Make the writes visible."""

    @abstractmethod
    def abort(self, txn: Txn) -> Finished:
        """Undo the writes, whether or not they were prepared."""

    @abstractmethod
    def recover_and_commit(self, handle: dict[str, Any]) -> Finished:
        """Commit what another process has prepared. A transaction that is gone was committed before."""

    @abstractmethod
    def recover_and_abort(self, handle: dict[str, Any]) -> Finished:
        """Abort what another process has prepared, or may have prepared."""

    @abstractmethod
    def list_prepared(self, prefix: str) -> Iterable[str]:
        """Return the gids with this prefix that the sink has prepared."""

    @abstractmethod
    def handle_of(self, gid: str) -> dict[str, Any]:
        """Return a handle with which a listed transaction can be aborted."""

    def bind(self, task: TaskWithTransactions) -> BoundTwoPhase:
        return BoundTwoPhase(self, task)

    def effects(self, installation: uuid.UUID, task_id: uuid.UUID) -> Sequence[Effect]:
        """Ask the ledger, which decides. What it has decided to commit is committed, and visible sooner or later."""
        del installation
        return transactions.effects_by_decision(self.name, task_id)


class TaskWithTransactions(Protocol):
    """What a two-phase sink needs of the running task (`task_sinks.py`)."""

    def check_lease(self) -> None: ...

    def transaction(self, sink: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class BoundTwoPhase:
    """`task.sink(name)` for a two-phase sink."""

    sink: TwoPhaseCommitSink[Any, Any]
    task: TaskWithTransactions

    def run(self, function: Callable[..., Any], *arguments: Any, step: str = "") -> Any:
        """Call `function(db, *arguments)`, or with a folder instead of `db`. Everything commits with SUCCEEDED.

        All calls of one task for one sink are one transaction, which stays open until the handler returns: write to
        sinks at the end of a handler. `step` is accepted for symmetry with keyed sinks and has no meaning here.
        """
        del step
        self.task.check_lease()
        return self.sink.invoke(lambda place: function(place, *arguments), self.task.transaction(self.sink))


def gid_prefix(installation: uuid.UUID) -> str:
    """Return how the gids of this installation begin, in every sink."""
    return f"{PREFIX}:{settings.current().ledger_schema}:{installation.hex[:12]}:"


def gid_of(installation: uuid.UUID, task_id: uuid.UUID, token: uuid.UUID, sink: str) -> str:
    """Return the name of the transaction of one attempt in one sink, of fewer than 200 bytes."""
    return f"{gid_prefix(installation)}{task_id.hex}:{token.hex}:{sink}"


def sink_of(gid: str) -> str:
    """Return the name of the sink that a gid belongs to."""
    return gid.rpartition(":")[2]
