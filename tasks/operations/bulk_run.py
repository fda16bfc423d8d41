"""Work a bulk action off: count, canaries first, then batch after batch at the given rate, then the dead-letter queue.

Only the process with the token of the row writes. Each batch and its number are one transaction, which is rolled back
if the token is gone. While the ledger is unreachable, the action waits; a batch whose answer was lost may be repeated,
because the tasks that it has changed do not match any more. When the process ends, the action is stopped.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, TextClause
from sqlalchemy.orm import Session

import settings
from models.bulk_actions import BulkState, BulkVerb
from models.database_errors import translate
from models.errors import CeleriacError
from models.ledger_outage import is_outage, wait_for_ledger
from models.sql import sql
from outbox.dead_rows import batch_size
from tasks.core.registered_types import registered_limits
from tasks.core.wakeups import wake_again
from tasks.execution.limits import wake_waiting
from tasks.operations import bulk_statements as statements
from tasks.operations import dead_letter_queue, dead_tasks
from tasks.operations.bulk_actions import COLUMNS, BulkRow, chosen_values, filter_from_json
from tasks.operations.wait_final import Statuses, all_succeeded, in_words, watch

logger = logging.getLogger(__name__)

SIGN_SECONDS: Final = 5.0  # between two signs of life while nothing is written
SAMPLE: Final = 50  # tasks that an action remembers by their ids
START: Final = {"after_at": "-infinity", "after_id": uuid.UUID(int=0)}
Place = dict[str, Any]
Answer = TypeVar("Answer")

_OURS: Final = "id = :id AND token = :token"
_SEEN: Final = "seen_at = (SELECT ledger.ledger_now())"
# claim: waiting → running. The one that has waited longest.
CLAIM: Final = sql(f"""
    UPDATE ledger.bulk_action
    SET state = 'running', token = :token, started_at = coalesce(started_at, (SELECT ledger.ledger_now())), {_SEEN}
    WHERE id = (SELECT id FROM ledger.bulk_action WHERE state = 'waiting'
                ORDER BY created_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING {COLUMNS}
""")
SIGN: Final = sql(f"UPDATE ledger.bulk_action SET {_SEEN} WHERE {_OURS} RETURNING id")
COUNTED: Final = sql(f"""
    UPDATE ledger.bulk_action SET matched = changed + :matched, left_out = :left_out, {_SEEN}
    WHERE {_OURS} RETURNING id
""")
# progress: add a batch.
PROGRESS: Final = sql(f"""
    UPDATE ledger.bulk_action
    SET changed = changed + cardinality(CAST(:ids AS uuid[])), {_SEEN},
        sample = (sample || CAST(:first_ids AS uuid[]))[1:{SAMPLE}],
        canary_ids = CASE WHEN :are_canaries THEN coalesce(canary_ids, '{{}}') || CAST(:ids AS uuid[])
                          ELSE canary_ids END
    WHERE {_OURS} RETURNING id
""")
CANARY_IDS: Final = sql(f"SELECT coalesce(canary_ids, '{{}}') FROM ledger.bulk_action WHERE {_OURS}")
SUCCEEDED: Final = sql(f"""
    UPDATE ledger.bulk_action SET canary_statuses = CAST(:statuses AS jsonb), {_SEEN} WHERE {_OURS} RETURNING id
""")
# end: running → done | stopped | canary failed. Canaries that failed are written with the end: between two statements
# the process could die, and an action with canary_statuses goes on with the other tasks.
END: Final = sql(f"""
    UPDATE ledger.bulk_action
    SET state = :state, token = NULL, finished_at = (SELECT ledger.ledger_now()), {_SEEN},
        canary_statuses = coalesce(CAST(:statuses AS jsonb), canary_statuses),
        message = nullif(concat_ws(' ', message, nullif(CAST(:message AS text), '')), '')
    WHERE {_OURS} RETURNING id
""")


class _TokenLost(Exception):
    """The action was stopped, or another process has claimed it."""


class _ProcessEnds(Exception):
    """This process is stopped."""


@dataclass(frozen=True, slots=True)
class BulkClaim:
    """An action, and the token with which this process may work it off."""

    action: BulkRow
    token: uuid.UUID


def claim_next(engine: Engine) -> BulkClaim | None:
    """Claim the action that has waited longest; return None if none waits."""
    token = uuid.uuid4()
    with engine.begin() as connection:
        row = connection.execute(CLAIM, {"token": token}).one_or_none()
    return BulkClaim(BulkRow(*row), token) if row else None


def work_off(engine: Engine, claim: BulkClaim, *, stopped: Event) -> None:
    """Do what the action says, and write down how it ended. `stopped` ends it early; it can be continued."""
    run = _Run(engine, claim, stopped)
    id_ = claim.action.id
    try:
        run.run()
    except _TokenLost:
        logger.info("The bulk action %s was stopped.", id_, extra={"event": "bulk_action_stopped"})
        run.sync_dead_letters()
    except _ProcessEnds:
        run.end(BulkState.STOPPED, "Stopped because the API process that did it was stopped.")
    except Exception as error:
        known = translate(error) or error
        why = known.message if isinstance(known, CeleriacError) else "The log of the API has the details."
        logger.exception("The bulk action %s failed.", id_, extra={"event": "bulk_action_failed"})
        run.end(BulkState.STOPPED, f"Stopped by an error. {why}")


class _Run:
    """One action in this process."""

    def __init__(self, engine: Engine, claim: BulkClaim, stopped: Event) -> None:
        self.engine = engine
        self.action = claim.action
        self.values = {"id": claim.action.id, "token": claim.token}
        self.stopped = stopped
        self.signed_at = time.monotonic()

    def run(self) -> None:
        self.chosen = filter_from_json(self.action.filter)
        self.sources = statements.needed_sources(self.action.verb, self.chosen)
        if self.action.matched is None:
            self._repeat(self._count)
        if self.action.canary and self.action.canary_statuses is None and not self._canaries_succeed():
            return
        self._change_all()
        self.end(BulkState.DONE, self.sync_dead_letters())

    def end(self, state: BulkState, message: str, *, statuses: str | None = None) -> None:
        """Write down the end. If the action is not ours any more, its row says already what became of it."""
        with suppress(_TokenLost, _ProcessEnds):
            self._write(END, state=state, message=message, statuses=statuses)

    def sync_dead_letters(self) -> str:
        """Bring the dead-letter queue up to date; return a note if a server is unreachable."""
        if self.action.verb is BulkVerb.RUN_NOW or self.stopped.is_set():
            return ""
        try:
            dead_letter_queue.sync(self.engine, settings.current())
        except Exception as error:
            if not is_outage(error):  # an unreachable broker is one, too
                raise
            return "The dead-letter queue was not updated, because the broker was unreachable; the next prune does it."
        return ""

    def _count(self) -> None:
        with self.engine.begin() as connection:
            statement = statements.count(self.action.verb, self.chosen)
            matched, left_out = connection.execute(statement, self._chosen_values(connection)).one()
            self._execute(connection, COUNTED, matched=matched, left_out=left_out)

    def _canaries_succeed(self) -> bool:
        """Change the canaries and wait for them; unless all succeed, end the action and return False."""
        for source in self.sources:
            statement = statements.change(self.action.verb, source, self.chosen)
            self._repeat(partial(self._change_canaries, statement))
        ids = self._repeat(self._canary_ids)
        if not ids:
            self.end(BulkState.DONE, "No task was changed: none matched any more, or other processes held them.")
            return False
        found = self._repeat(partial(self._wait_for, ids))
        statuses = json.dumps({status or "gone": number for status, number in found.items()})
        if all_succeeded(found):
            self._write(SUCCEEDED, statuses=statuses)
            return True
        text = f"Not all canaries succeeded in time ({in_words(found)}), so the others were left unchanged."
        note = self.sync_dead_letters()
        self.end(BulkState.CANARY_FAILED, f"{text} {note}".strip(), statuses=statuses)
        return False

    def _change_canaries(self, statement: TextClause) -> None:
        """Change as many tasks as there are canaries missing."""
        missing = (self.action.canary or 0) - len(self._canary_ids())
        if missing > 0:
            self._change_batch(statement, START, missing, are_canaries=True)

    def _canary_ids(self) -> list[uuid.UUID]:
        with self.engine.connect() as connection:
            return list(self._execute(connection, CANARY_IDS))

    def _wait_for(self, ids: list[uuid.UUID]) -> Statuses:
        found = Statuses()
        for statuses in watch(self.engine, ids, seconds=self.action.canary_seconds or 0, stopped=self.stopped):
            found = statuses
            self._give_sign()
        self._check_process()
        return found

    def _change_all(self) -> None:
        began_at, done, per_second = time.monotonic(), 0, self.action.per_second
        size = batch_size(per_second)
        for source in self.sources:
            statement = statements.change(self.action.verb, source, self.chosen)
            place: Place | None = START
            while place is not None:
                if per_second is not None:
                    self._wait_until(began_at + done / per_second)
                self._check_process()
                number, place = self._repeat(partial(self._change_batch, statement, place, size))
                done += number

    def _change_batch(
        self, statement: TextClause, place: Place, size: int, *, are_canaries: bool = False
    ) -> tuple[int, Place | None]:
        """Change a batch; return its size, and the place where the next one begins, or None after the last one."""
        with Session(self.engine) as db:
            values = {
                **self._chosen_values(db.connection()),
                **place,
                "batch": size,
                "actor": self.action.actor,
                "reason": f"{self.action.reason} (bulk action {self.action.id})",
                "reset_steps": self.action.reset_steps,
            }
            row = dead_tasks.execute(db, statement, values)
            ids = list(row["changed"] or ())
            if self.action.verb is BulkVerb.RUN_NOW:
                wake_again(db, ids, queues=settings.current().ingest_queues)
            elif self.action.verb is BulkVerb.DISCARD and ids:
                wake_waiting(db, ids, limits=registered_limits(db.connection()))
            self._execute(db.connection(), PROGRESS, ids=ids, first_ids=ids[:SAMPLE], are_canaries=are_canaries)
            db.commit()
        self.signed_at = time.monotonic()
        is_last = len(ids) < size
        return len(ids), None if is_last else {"after_at": row["after_at"], "after_id": row["after_id"]}

    def _chosen_values(self, connection: Connection) -> dict[str, Any]:
        values = chosen_values(connection, self.action.verb, self.chosen, self.action.as_of)
        return values | {"accept_duplicates": self.action.accept_duplicates}

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self.stopped.wait(min(left, SIGN_SECONDS))
            self._check_process()
            self._give_sign()

    def _give_sign(self) -> None:
        """Say that this process lives, now and then; raise _TokenLost if the action was stopped meanwhile."""
        if time.monotonic() - self.signed_at >= SIGN_SECONDS:
            self._write(SIGN)

    def _write(self, statement: TextClause, **values: Any) -> None:
        def write() -> None:
            with self.engine.begin() as connection:
                self._execute(connection, statement, **values)

        self._repeat(write)
        self.signed_at = time.monotonic()

    def _execute(self, connection: Connection, statement: TextClause, **values: Any) -> Any:
        """Execute a statement on our row and return its first column. Raises _TokenLost."""
        row = connection.execute(statement, {**self.values, **values}).one_or_none()
        if row is None:
            raise _TokenLost
        return row[0]

    def _repeat(self, work: Callable[[], Answer]) -> Answer:
        """Call `work` until the ledger answers. It must be safe to repeat. Raises _ProcessEnds."""
        return wait_for_ledger(work, pause=self._pause)

    def _pause(self, seconds: float) -> None:
        self.stopped.wait(seconds)
        self._check_process()

    def _check_process(self) -> None:
        if self.stopped.is_set():
            raise _ProcessEnds
