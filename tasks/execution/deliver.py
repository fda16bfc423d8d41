"""`tasks.ingest(ids)`: what a worker does with one message.

    claim ─► run ─► settle, batch by batch, until every id was claimed or refused

The message may be a duplicate, late, or made by hand: the claim decides what runs. Celery acknowledges the message when
`deliver` returns or raises an error; at that point each task that was claimed is settled or released. If this process
dies before, the broker delivers the message again, and reclaim settles the tasks that were claimed: one that was alone
has failed, several will each run alone. If an error ends `deliver` early, ids that were not claimed yet wait until
`recovery/lost_wakeups.py` wakes them.

While the ledger is unreachable, the message is kept and the process waits. Each process holds one message, so a worker
whose processes all wait takes no more messages from the broker.

If the broker has no messages for the queue when a batch of the handler's full size is done, the wake-ups of other due
tasks may be lost. So the process goes on with them, until a second after its first claim; then it is free for the
messages of other queues. An async handler fills free places by itself (`run_async.py`).
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import metrics
import settings
from failpoint import failpoint
from models.engine import autocommit
from models.errors import CeleriacError
from models.ledger_outage import wait_for_ledger
from tally.counts import count
from tally.subjects import Subject
from tasks.core import wakeups
from tasks.core.batch_size import is_kept_small
from tasks.core.holders import holder_of
from tasks.core.outcomes import Released, Snoozed
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.registry import find, handlers
from tasks.execution.claim import Claim, claim
from tasks.execution.due_tasks import find_due, find_woken
from tasks.execution.limits import claim_admitted
from tasks.execution.run import run
from tasks.execution.run_async import run_async
from tasks.execution.settle import release_token, release_unstarted
from tasks.execution.worker_end import worker_ends

logger = logging.getLogger(__name__)

Id = Any  # text in a message, a UUID in the answer to a claim
Owned = Callable[[Sequence[uuid.UUID]], None]
UNHANDLED_SECONDS: Final = 30.0
# Ids with a partition key that are given to one claim; the batch is filled with the tasks behind them. While a process
# has a key, other processes can do nothing for it.
KEYED_AT_ONCE: Final = 100
MOST_LOOKS: Final = 3  # for due tasks that no other claim holds
GO_ON_SECONDS: Final = 1.0  # lost wake-ups are noticed and sent again meanwhile
ID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def deliver(
    engine: Engine, ids: Sequence[Any], *, owned: Owned | None = None, is_empty: Callable[[str], bool] | None = None
) -> None:
    """Run what may run of these tasks: those without a partition key, then those with one, then those with limits.

    `is_empty` says whether the broker has no message for a queue. Without it, the process does not go on with other
    tasks after a full batch.

    The Kafka worker passes `owned`. It is called after each claim with the ids that are still to be claimed. For all
    other ids the ledger is responsible from then on, durably, so the worker may commit their offsets.
    """
    left = Left(known_ids(ids))
    began_at: float | None = None  # at the first claim: the ledger may have been unreachable before
    while left.all():
        claimed = _claim(engine, left, owned)
        if not claimed.tasks:
            continue
        began_at = began_at or time.monotonic()
        if claimed.handler.is_async:
            run_async(claimed, partial(_claim_more, engine, left, claimed, time.monotonic()))
            continue
        run(claimed)
        if is_empty and not left.all() and _may_go_on(claimed, began_at) and is_empty(claimed.tasks[0].queue):
            left.plain = find_due(engine, claimed, began_at, most=1)  # the claim adds the others


@dataclass(slots=True)
class Left:
    """The ids of a message that are still to be claimed: without and with a partition key, and with limits."""

    plain: Sequence[Id]
    keyed: list[uuid.UUID] = field(default_factory=list)
    limited: list[uuid.UUID] = field(default_factory=list)
    kinds: dict[uuid.UUID, tuple[str, str]] = field(default_factory=dict)  # queue and type, by the first claim

    def all(self) -> list[Id]:
        return [*self.plain, *self.keyed, *self.limited]

    def claim(self, engine: Engine, **how: Any) -> Claim:
        """Claim a batch of the first list that is not empty."""
        if self.plain:
            with autocommit(engine) as connection:
                return claim(connection, self.plain, **how)
        if self.keyed:
            with autocommit(engine) as connection:
                claimed = claim(connection, self.keyed[:KEYED_AT_ONCE], keyed=True, **how)
            claimed.left += self.keyed[KEYED_AT_ONCE:]
            return claimed
        with Session(engine) as db:
            claimed = claim_admitted(db, self.limited, **how)
            db.commit()
        return claimed

    def forget(self, ids: set[uuid.UUID]) -> None:
        """Leave out ids that `_claim_more` has claimed."""
        self.plain = [id_ for id_ in self.plain if id_ not in ids]
        self.limited = [id_ for id_ in self.limited if id_ not in ids]

    def replace_claimed(self, claimed: Claim, left: list[uuid.UUID]) -> None:
        """Note what a claim has left of the list that it was made from."""
        if self.plain:
            self.plain = left
        elif self.keyed:
            self.keyed = left
        else:
            self.limited = left
        self.keyed += claimed.keyed
        self.limited += claimed.limited


def _claim_more(engine: Engine, left: Left, before: Claim, began_at: float, most: int) -> Claim | None:
    """Claim other due tasks of the same queue and type, to run beside those of an earlier claim, which began then.

    Tasks with a partition key are not among them; they have wake-ups of their own. If others hold all that were found,
    or have just claimed them, it looks for the next ones.
    """
    only = {before.handler.type: replace(before.handler, batch=most)}
    tried: list[uuid.UUID] = []
    for _ in range(MOST_LOOKS):
        due = Left(find_due(engine, before, began_at, most=most, but=tried))
        tried += due.plain
        if before.handler.limits is not None:
            due.limited = find_woken(engine, before, began_at, most=most)
        if not due.all():
            return None
        while due.all():
            claimed = _claim(engine, due, None, handlers=only)
            if claimed.tasks:
                left.forget({task.id for task in claimed.tasks})
                return claimed
    return None


def _may_go_on(claimed: Claim, began_at: float) -> bool:
    """Return True after a full batch, for a second after the first claim, unless the worker is about to end."""
    handler = claimed.handler
    if (
        worker_ends()
        or len(claimed.tasks) < handler.batch
        or handler.batch == 1
        or time.monotonic() - began_at > GO_ON_SECONDS
    ):
        return False
    return handler.limits is None and claimed.tasks[0].partition_key is None


def _claim(engine: Engine, left: Left, owned: Owned | None, **how: Any) -> Claim:
    """Claim one batch and return it; `left` has then what is still to be claimed."""
    current = settings.current()
    tokens: list[uuid.UUID] = []

    def attempt() -> Claim:
        if tokens:  # the last attempt may have claimed something although its answer was lost
            release_token(engine, tokens[0], Released("the answer to its claim was lost"))
        tokens[:] = [uuid.uuid4()]
        return left.claim(
            engine,
            **{"handlers": handlers(), **how},
            holder=holder_of(os.getpid()),
            lease_seconds=current.ingest_lease_seconds,
            token=tokens[0],
            durable=owned is not None,
        )

    try:
        claimed = wait_for_ledger(attempt)
        failpoint("ingest.after_claim")
        _measure(claimed)
        left.kinds |= claimed.kinds
        _count("skipped", claimed.skipped, left)
        _count("not_due", [*claimed.not_due, *claimed.paused], left)
        # A rolling deploy: another worker may know the type, or this one after its restart.
        _wake_again(engine, claimed.unhandled, after_seconds=UNHANDLED_SECONDS)
        _wake_again(engine, claimed.next_in_line, after_seconds=NEXT_SECONDS, waits_in_line=True)
        left.replace_claimed(claimed, _left_to_us(engine, claimed))
        if owned:
            owned(left.all())
        if claimed.tasks:
            claimed.begin(engine, find(claimed.tasks[0].type), lease_seconds=current.ingest_lease_seconds)
    except BaseException as error:  # a signal may stop the worker here, too
        why = f"it was not started: {type(error).__name__}"
        # After an error, wait a second: the same error would probably happen again at once.
        outcome = Snoozed(1.0, why) if isinstance(error, Exception) else Released(why)
        for token in tokens:
            release_unstarted(engine, token, outcome)
        raise
    return claimed


def _left_to_us(engine: Engine, claimed: Claim) -> list[uuid.UUID]:
    """Return the ids that this process claims next.

    If tasks of this type are slow, there are none: the rest of the ids gets a new wake-up, so that other workers share
    the work.
    """
    if not claimed.tasks or not is_kept_small(find(claimed.tasks[0].type), len(claimed.tasks)):
        return claimed.left
    try:
        _wake_again(engine, claimed.left, queues=[claimed.tasks[0].queue], restarts_grace=True)
    except (DBAPIError, CeleriacError) as error:  # the claimed tasks must run all the same
        logger.warning(
            "Not left to other workers: %s", str(error).partition("\n")[0], extra={"event": "tasks_not_shared"}
        )
        return claimed.left
    return []


def _wake_again(engine: Engine, ids: Sequence[uuid.UUID], *, queues: Sequence[str] = (), **how: Any) -> None:
    """Insert new wake-ups. This process publishes those for `queues`; the relay publishes the others."""

    def write() -> None:
        with Session(engine) as db:
            wakeups.wake_again(db, ids, queues=queues, **how)
            db.commit()

    if ids:
        wait_for_ledger(write)


def _count(result: str, ids: Sequence[uuid.UUID], left: Left) -> None:
    """Count deliveries by queue and type. Both are empty for an id that names no task."""
    for (queue, type_), how_many in Counter(left.kinds.get(id_, ("", "")) for id_ in ids).items():
        count(Subject.TASK, result, how_many, queue=queue, type=type_)


def _measure(claimed: Claim) -> None:
    verdicts: dict[str, Sized] = {
        "run": claimed.tasks,
        "skipped": claimed.skipped,
        "not_due": claimed.not_due,
        "paused": claimed.paused,
        "unhandled": claimed.unhandled,
    }
    for verdict, tasks in verdicts.items():
        if tasks:
            metrics.CLAIMS_TOTAL.labels(verdict).inc(len(tasks))


def known_ids(ids: Sequence[Any]) -> list[str]:
    """Drop strings that are not UUIDs, and count them as skipped: they cannot name a task."""
    found = [id_ for id_ in map(str, ids) if ID.fullmatch(id_)]
    count(Subject.TASK, "skipped", len(ids) - len(found))
    return found
