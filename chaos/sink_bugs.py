"""Five bugs, each of which `manage.py chaos sinks` must find. They replace parts of the real code at run time.

fence_dropped          settling no longer requires the token, so that a late worker may settle
ack_before_commit      the task is SUCCEEDED before its sinks have committed
gid_reused             all attempts of a task use the same transaction in a two-phase sink
dedup_after_effect     a keyed sink commits the effect first, and its key afterwards
decision_after_commit  a two-phase sink commits before the ledger has decided
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Any, Final

from sqlalchemy.orm import Session

from failpoint import failpoint
from models.prepared_statements import Prepared
from sinks import keyed_postgres, task_sinks
from sinks.keyed_postgres import BoundKeyedPostgres
from sinks.manual_transaction import ManualTransaction
from sinks.task_sinks import TaskSinks
from tasks.core.outcomes import DONE
from tasks.core.registry import find
from tasks.execution import settle

FENCE: Final = "AND lease_token = :token AND status = 'RUNNING'"
SAME_TOKEN: Final = uuid.UUID(int=0)


class Bug(StrEnum):
    """A bug that the chaos must find."""

    FENCE_DROPPED = "fence_dropped"
    ACK_BEFORE_COMMIT = "ack_before_commit"
    GID_REUSED = "gid_reused"
    DEDUP_AFTER_EFFECT = "dedup_after_effect"
    DECISION_AFTER_COMMIT = "decision_after_commit"


@contextmanager
def with_bug(bug: Bug | None) -> Iterator[None]:
    """Give this process, and those that it forks, the bug until the end of the block."""
    if bug is None:
        yield
        return
    place, name, make = _BUGS[bug]
    right = getattr(place, name)
    setattr(place, name, make(right))
    try:
        yield
    finally:
        setattr(place, name, right)


def _drop_fence(settling: Callable[..., Prepared]) -> Callable[..., Prepared]:
    @cache
    def without_fence(outcome: Any, *, frees_keys: bool = False, in_batch: bool = False) -> Prepared:
        statement = settling(outcome, frees_keys=frees_keys)._statement.text
        assert FENCE in statement
        return Prepared(statement.replace(FENCE, ""), before="CLOSE celeriac_batch;" if in_batch else "")

    return without_fence


def _acknowledge_first(check_lease: Callable[[TaskSinks], None]) -> Callable[[TaskSinks], None]:
    """Settle the task when it first writes to a sink; its own settling is refused later, and nothing is run again."""

    def check_and_acknowledge(self: TaskSinks) -> None:
        check_lease(self)
        with Session(self.bind) as db:
            settle.write_outcomes(db, {self.task: DONE}, token=self.held.token, handler=find(self.task.type))
            db.commit()

    return check_and_acknowledge


def _reuse_gid(gid_of: Callable[..., str]) -> Callable[..., str]:
    def without_token(installation: uuid.UUID, task_id: uuid.UUID, _token: uuid.UUID, sink: str) -> str:
        return gid_of(installation, task_id, SAME_TOKEN, sink)

    return without_token


def _remember_last(_attempt: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(self: BoundKeyedPostgres, function: Callable[..., Any], arguments: Sequence[Any], step: str) -> Any:
        key = {
            "installation": self.task.installation,
            "sink": self.sink.name,
            "task_id": self.task.task_id,
            "step": step,
        }
        effect = ManualTransaction(self.sink.engine)
        if effect.connection.execute(keyed_postgres.RESULT, key).first():
            effect.roll_back()
            return
        failpoint("keyed.before_effect")
        function(effect.db, *arguments)
        effect.flush()
        effect.commit()
        failpoint("keyed.before_commit")
        ManualTransaction(self.sink.engine, keyed_postgres.CLAIM_KEY, key).commit()
        failpoint("keyed.after_commit")

    return attempt


def _commit_first(before_settling: Callable[[TaskSinks], None]) -> Callable[[TaskSinks], None]:
    def prepare_and_commit(self: TaskSinks) -> None:
        before_settling(self)
        for sink, txn in self._open.values():
            sink.commit(txn)
        failpoint("sinks.before_decision")

    return prepare_and_commit


# The bug → where the right function is, its name, and what makes the wrong one of it.
_BUGS: Final[dict[Bug, tuple[Any, str, Callable[[Any], Any]]]] = {
    Bug.FENCE_DROPPED: (settle, "settling", _drop_fence),
    Bug.ACK_BEFORE_COMMIT: (TaskSinks, "check_lease", _acknowledge_first),
    Bug.GID_REUSED: (task_sinks, "gid_of", _reuse_gid),
    Bug.DEDUP_AFTER_EFFECT: (BoundKeyedPostgres, "_attempt", _remember_last),
    Bug.DECISION_AFTER_COMMIT: (TaskSinks, "before_settling", _commit_first),
}
