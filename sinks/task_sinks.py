"""The sinks of one running task: what its handler wrote, and what is left to the settling of the task.

    the handler runs      `task.sink(name)` opens sinks; two-phase transactions begin, other writes are deferred
    `before_settling`     stores the handles of the transactions, and prepares them
    `decide` (in settle)  decides `commit` in the transaction that writes SUCCEEDED
    `close`               obeys the decision of the ledger: commit, or abort
    `abort`               instead of all that, if the handler failed

Each of these may be the last thing that this process does; recovery does the rest (`recovery.py`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from failpoint import failpoint
from models.engine import Bind, autocommit
from models.errors import CeleriacError
from models.ledger_outage import wait_for_ledger
from models.sql import sql
from outbox.lease import Db
from sinks import transactions
from sinks.configuration import open_sinks
from sinks.contract import SinkMisused
from sinks.two_phase import Finished, TwoPhaseCommitSink, gid_of
from tasks.core.lease import HeldLease
from tasks.core.outcomes import Finish, Snooze
from tasks.core.steps import Steps
from tasks.core.task import Task
from tracing import task_fields

logger = logging.getLogger(__name__)

# note_use: this type may have effects in this sink, durably before the first one.
NOTE_USE: Final = sql("""
    INSERT INTO ledger.sink_use (type, sink, created_at) VALUES (:type, :sink, ledger.ledger_now())
    ON CONFLICT DO NOTHING
""")
PREDECESSOR_SECONDS: Final = 1.0  # until a task looks again whether the sink has obeyed an earlier task of its key
CLOSE_SECONDS: Final = 3.0  # how long a worker waits for the ledger before it leaves the rest to recovery
LEDGER_ERRORS: Final = (SQLAlchemyError, CeleriacError)
OBEYED: Final = (Finished.DONE, Finished.ALREADY_DONE)
AnySink = TwoPhaseCommitSink[Any, Any]
Write = Callable[[Session], object]


class TaskSinks:
    """What one task has written to sinks."""

    def __init__(self, bind: Bind, task: Task, held: HeldLease, steps: Steps) -> None:
        self.bind = bind
        self.task = task
        self.held = held
        self.steps = steps
        self._used: set[tuple[str, str, str]] = set()  # by `using_once`
        self.deferred: list[Write] = []  # run in the transaction that settles the task
        self._open: dict[str, tuple[AnySink, Any]] = {}  # by gid
        self.gids: list[str] = []  # whose handles are stored
        self._attempts = 0  # to settle the task
        self._decided = False  # by the last of them

    def open(self, name: str) -> Any:
        """Return the object with which the handler writes to this sink."""
        sinks = open_sinks()
        sink = sinks.find(name)
        self._note_use(name)
        return sink.bind(self)

    @property
    def has_open_work(self) -> bool:
        """Return True if something was begun in a sink or deferred, which settling the task must complete."""
        return bool(self._open or self.deferred)

    @property
    def task_id(self) -> uuid.UUID:
        return self.task.id

    @property
    def installation(self) -> uuid.UUID:
        return open_sinks().installation()

    def check_lease(self) -> None:
        """Raise LeaseLost if another worker may run the task."""
        self.held.check()

    @property
    def traceparent(self) -> object:
        return self.task.context.get("traceparent")

    @contextmanager
    def using_once(self, sink: str, step: str, *, where: str = "") -> Iterator[None]:
        """Raise SinkMisused if the handler has completed this step in the sink before, in this attempt.

        A keyed sink would take the second effect for a repetition of the first one, and skip it.
        """
        used = (sink, step, where)
        if used in self._used:
            raise SinkMisused(
                f"The handler has used the step {step!r} of the sink {sink} before: give each effect its own `step`."
            )
        yield
        self._used.add(used)

    def defer(self, write: Write) -> None:
        """Run this in the transaction that writes SUCCEEDED."""
        self.deferred.append(write)

    def transaction(self, sink: AnySink) -> Any:
        """Return the transaction of this task in a sink. The first call begins it."""
        gid = gid_of(self.installation, self.task.id, self.held.token, sink.name)
        if gid not in self._open:
            if self.task.partition_key is not None:
                self._finish_predecessors(sink, self.task.partition_key)
            self._open[gid] = (sink, sink.begin_transaction(gid))
        return self._open[gid][1]

    def before_settling(self) -> None:
        """Store the handles, then prepare. After this, recovery knows all that the sinks may have prepared."""
        if not self._open:
            return
        self.held.check()
        handles = {gid: (sink.name, txn.handle) for gid, (sink, txn) in self._open.items()}
        failpoint("sinks.before_handles")
        self.gids = list(handles)
        transactions.store_handles(self.bind, self.task.id, self.held.token, handles)
        failpoint("sinks.after_handles")
        for sink, txn in self._open.values():
            sink.pre_commit(txn)
            failpoint("sinks.after_prepare")
        failpoint("sinks.before_decision")

    def decide(self, db: Db, *, has_succeeded: bool) -> None:
        """Decide `commit`, in the transaction that writes SUCCEEDED. Called for every attempt to settle the task."""
        self._attempts += 1
        self._decided = has_succeeded
        if has_succeeded:
            transactions.decide_commit(db, self.gids, self.held.token)

    def finishing(self, result: Any) -> Finish:
        """Return what the settling transaction has to write: what was deferred, then the handler's own `Finish`."""
        last = result if isinstance(result, Finish) else Finish(lambda _db: None, result)

        def write(db: Session) -> object:
            for each in self.deferred:
                each(db)
            return last.write(db)

        return Finish(write, last.result)

    def close(self) -> list[str]:
        """Obey the ledger's decision. Called when the task is settled. Return the gids that are committed."""
        if not self._open:
            return []
        try:
            commits = self._is_commit()
        except LEDGER_ERRORS as error:
            self._open = {}
            logger.warning(
                "Sink transactions of the task %s are left to recovery: %s",
                self.task.id,
                _line(error),
                extra=task_fields("sink_left_to_recovery", self.task),
            )
            return []
        if commits:
            return self._obey(self._commit)
        self.abort()
        return []

    def abort(self) -> None:
        """Abort everything that is open: the task has not succeeded."""
        if not self._open:
            return
        try:
            if self.gids:
                transactions.decide_abort(self.bind, list(self._open), seconds=CLOSE_SECONDS)
        except LEDGER_ERRORS as error:  # a transaction without a decision is aborted all the same
            logger.warning(
                "Aborted without a record: the task %s: %s",
                self.task.id,
                _line(error),
                extra=task_fields("sink_abort_unrecorded", self.task),
            )
        aborted = self._obey(lambda sink, txn: sink.abort(txn))
        try:
            if self.gids:
                transactions.finish(self.bind, aborted, seconds=CLOSE_SECONDS)
        except LEDGER_ERRORS as error:
            logger.warning(
                "Recovery will record what sinks have done for %s: %s",
                self.task.id,
                _line(error),
                extra=task_fields("sink_left_to_recovery", self.task),
            )

    def _is_commit(self) -> bool:
        """Return the decision. The ledger is asked if the answer to the settling may have been lost."""
        if self._attempts == 1:
            return self._decided
        decided = transactions.decisions(self.bind, self.gids, seconds=CLOSE_SECONDS)
        return "commit" in decided.values()

    @staticmethod
    def _commit(sink: AnySink, txn: Any) -> Finished:
        failpoint("sinks.before_commit")
        done = sink.commit(txn)
        failpoint("sinks.after_commit")
        return done

    def _obey(self, obey: Callable[[AnySink, Any], Finished]) -> list[str]:
        """Let all sinks obey; return the gids of those that have. What fails is left to recovery."""
        left, self._open = self._open, {}
        done = []
        for gid, (sink, txn) in left.items():
            try:
                if obey(sink, txn) in OBEYED:
                    done.append(gid)
            except Exception as error:  # client libraries raise many kinds
                logger.warning(
                    "Sink %s: left to recovery: %s",
                    sink.name,
                    _line(error),
                    extra={"event": "sink_left_to_recovery", "sink": sink.name},
                )
        return done

    def _finish_predecessors(self, sink: AnySink, partition_key: str) -> None:
        """Commit what earlier tasks of the partition key have left prepared, so that effects keep their order."""
        for gid, handle in transactions.unfinished_of_key(self.bind, sink.name, partition_key):
            if sink.recover_and_commit(handle) not in OBEYED:
                raise Snooze(PREDECESSOR_SECONDS)  # otherwise our effect could be visible before that one
            transactions.finish(self.bind, [gid])

    def _note_use(self, sink: str) -> None:
        used = (self.task.type, sink)
        if used in open_sinks().noted:
            return

        def write() -> None:
            with autocommit(self.bind) as connection:
                connection.execute(NOTE_USE, {"type": self.task.type, "sink": sink})

        wait_for_ledger(write)
        open_sinks().noted.add(used)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
