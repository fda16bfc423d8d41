"""A keyed sink in one other PostgreSQL: the effect and the key of the effect commit in one local transaction there.

    task.sink("billing").run(charge, payment)                 charge(db, payment) takes effect once per task
    task.sink("billing").run(refund, payment, step="refund")  a second effect of the same task

The key is (installation, sink, task, step), in the table `celeriac_sink.effect` of that database. A retry finds the key
and skips the function; a worker that comes late waits at the key for the transaction of the other one, and then skips.
So neither a lost answer nor a stale worker doubles the effect, and no two-phase commit is needed. The result of the
function is stored with the key, so a retry returns what the first call returned.

Keys are deleted after the key life of the sink. Within it a task must not be retried or requeued any more.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final

from psycopg2 import errors as postgres_errors
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from failpoint import failpoint
from models.ledger_outage import REPETITIONS, asks_to_repeat
from outbox.canonical_json import canonical_json
from sinks.contract import Effect, EffectState, Guarantee, Sink, SinkMisused, SinkNotReady, TaskWithSteps
from sinks.manual_transaction import ManualTransaction, sink_engine
from tasks.core.steps import NAME as STEP_NAME

DEFAULT_STEP: Final = "effect"
CREATE: Final = """
    CREATE SCHEMA IF NOT EXISTS celeriac_sink;
    CREATE TABLE IF NOT EXISTS celeriac_sink.effect (
        installation uuid NOT NULL,
        sink text NOT NULL,
        task_id uuid NOT NULL,
        step text NOT NULL,
        result jsonb,
        completed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (installation, sink, task_id, step));
    CREATE INDEX IF NOT EXISTS effect_completed_at ON celeriac_sink.effect (completed_at)
"""
# claim_key: a transaction that has inserted the same key but not ended yet is waited for. BEGIN saves a round trip.
CLAIM_KEY: Final = """
    BEGIN;
    INSERT INTO celeriac_sink.effect (installation, sink, task_id, step)
    VALUES (%(installation)s, %(sink)s, %(task_id)s, %(step)s) ON CONFLICT DO NOTHING RETURNING true
"""
_WHERE: Final = "WHERE installation = :installation AND sink = :sink AND task_id = :task_id"
STORE_RESULT: Final = text(f"UPDATE celeriac_sink.effect SET result = CAST(:result AS jsonb) {_WHERE} AND step = :step")
RESULT: Final = text(f"SELECT result FROM celeriac_sink.effect {_WHERE} AND step = :step")
EFFECTS: Final = text(f"SELECT step FROM celeriac_sink.effect {_WHERE} ORDER BY completed_at, step")
PRUNE: Final = text("""
    DELETE FROM celeriac_sink.effect WHERE ctid IN (
        SELECT ctid FROM celeriac_sink.effect WHERE installation = :installation AND sink = :sink
        AND completed_at < clock_timestamp() - make_interval(secs => :seconds) LIMIT :most)
""")
PRUNE_AT_ONCE: Final = 5000


class KeyedPostgres(Sink):
    """One other PostgreSQL."""

    guarantee: ClassVar[Guarantee] = Guarantee.KEYED

    def __init__(self, name: str, url: str, *, key_life: timedelta) -> None:
        self.name = name
        self.key_life: timedelta | None = key_life
        self.engine = sink_engine(name, url)

    @property
    def conditions(self) -> Sequence[str]:
        assert self.key_life is not None
        return [
            "The function writes through its `db` only: what it does elsewhere may be repeated.",
            f"No task runs later than {self.key_life.days} days after its first attempt: its key is deleted then.",
        ]

    def bind(self, task: TaskWithSteps) -> BoundKeyedPostgres:
        return BoundKeyedPostgres(self, task)

    def check(self) -> str:
        with self.says_what_is_missing(), self.engine.connect() as connection:
            connection.execute(text("SELECT FROM celeriac_sink.effect LIMIT 0"))
        return "its table is there"

    def effects(self, installation: uuid.UUID, task_id: uuid.UUID) -> Sequence[Effect]:
        key = {"installation": installation, "sink": self.name, "task_id": task_id}
        with self.says_what_is_missing(), self.engine.connect() as connection:
            steps = connection.execute(EFFECTS, key).scalars()
            return [Effect(self.name, EffectState.COMMITTED, step) for step in steps]

    def prepare(self) -> str:
        with self.engine.begin() as connection:
            connection.execute(text(CREATE))
        return "the table celeriac_sink.effect is there"

    def prune(self, installation: uuid.UUID) -> int:
        """Delete the keys that are older than the key life, some at a time; return how many."""
        assert self.key_life is not None
        values = {"installation": installation, "sink": self.name, "seconds": self.key_life.total_seconds()}
        with self.engine.begin() as connection:
            return connection.execute(PRUNE, {**values, "most": PRUNE_AT_ONCE}).rowcount

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def says_what_is_missing(self) -> Iterator[None]:
        try:
            yield
        except ProgrammingError as error:
            if isinstance(error.orig, postgres_errors.UndefinedTable | postgres_errors.InvalidSchemaName):
                message = f"The sink {self.name} has no table for its keys: run `manage.py sinks prepare {self.name}`."
                raise SinkNotReady(message) from None
            raise


@dataclass(frozen=True, slots=True)
class BoundKeyedPostgres:
    """`task.sink(name)` for a keyed PostgreSQL."""

    sink: KeyedPostgres
    task: TaskWithSteps

    def run(self, function: Callable[..., Any], *arguments: Any, step: str = DEFAULT_STEP) -> Any:
        """Call `function(db, *arguments)` and commit, unless this step of the task has been committed before.

        Returns what the function returned then, as JSON. A transaction that the database asks to repeat is repeated.
        """
        if not STEP_NAME.fullmatch(step):
            raise SinkMisused("The name of a step must be text of 1 to 200 characters without control characters.")
        with self.task.using_once(self.sink.name, step), self.sink.says_what_is_missing():
            for repetition in range(REPETITIONS + 1):
                self.task.check_lease()
                try:
                    return self._attempt(function, arguments, step)
                except DBAPIError as error:
                    if not asks_to_repeat(error) or repetition == REPETITIONS:
                        raise
        raise AssertionError  # the last repetition returns or raises

    def _attempt(self, function: Callable[..., Any], arguments: Sequence[Any], step: str) -> Any:
        key = {
            "installation": self.task.installation,
            "sink": self.sink.name,
            "task_id": self.task.task_id,
            "step": step,
        }
        transaction = ManualTransaction(self.sink.engine, CLAIM_KEY, key)
        try:
            if transaction.answer is None:  # it was done before
                return transaction.connection.execute(RESULT, key).scalar()
            failpoint("keyed.before_effect")
            result = function(transaction.db, *arguments)
            transaction.flush()
            if result is not None:
                result = json.loads(written := canonical_json(result, what=f"result of the step {step!r}"))
                transaction.connection.execute(STORE_RESULT, {**key, "result": written})
            self.task.check_lease()
            failpoint("keyed.before_commit")
            transaction.commit()
            failpoint("keyed.after_commit")
            return result
        finally:
            transaction.roll_back()
