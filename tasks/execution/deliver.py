"""`tasks.ingest(ids)`: what a worker does with one message.

    claim ─► run ─► settle, batch by batch, until every id was claimed or refused

The message may be a duplicate, late, or made by hand: the claim decides what runs. Celery acknowledges the message when
`deliver` returns or raises an error; at that point each task that was claimed is settled or released. If this process
dies before, the broker delivers the message again, and reclaim settles the tasks that were claimed: one that was alone
has failed, several will each run alone. If an error ends `deliver` early, ids that were not claimed yet wait until
`recovery/lost_wakeups.py` wakes them.

While the ledger is unreachable, the message is kept and the process waits. Each process holds one message, so a worker
whose processes all wait takes no more messages from the broker.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import settings
from failpoint import failpoint
from models.engine import autocommit
from models.errors import CeleriacError
from models.ledger_outage import wait_for_ledger
from tasks.core import wakeups
from tasks.core.batch_size import is_kept_small
from tasks.core.holders import holder_of
from tasks.core.outcomes import Released, Snoozed
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.registry import find, handlers
from tasks.core.result_metrics import count
from tasks.execution.claim import Claim, claim
from tasks.execution.run import run
from tasks.execution.settle import release_token, release_unstarted

logger = logging.getLogger(__name__)

Owned = Callable[[Sequence[uuid.UUID]], None]
Id = str | uuid.UUID
UNHANDLED_SECONDS: Final = 30.0
ID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def deliver(engine: Engine, ids: Sequence[Any], *, owned: Owned | None = None) -> None:
    """Run what may run of these tasks: first those without a partition key, then those with one.

    The Kafka worker passes `owned`. It is called after each claim with the ids that are still to be claimed. For all
    other ids the ledger is responsible from then on, durably, so the worker may commit their offsets.
    """
    plain: Sequence[Id] = known_ids(ids)
    keyed: list[uuid.UUID] = []
    while plain or keyed:
        claimed, plain, keyed = _claim(engine, plain, keyed, owned)
        if claimed.tasks:
            run(claimed)


def _claim(
    engine: Engine, plain: Sequence[Id], keyed: list[uuid.UUID], owned: Owned | None
) -> tuple[Claim, list[uuid.UUID], list[uuid.UUID]]:
    """Claim one batch; return it, and the ids that are left to claim, without and with a partition key."""
    current = settings.current()
    tokens: list[uuid.UUID] = []

    def attempt() -> Claim:
        if tokens:  # the last attempt may have claimed something although its answer was lost
            release_token(engine, tokens[0], Released("the answer to its claim was lost"))
        tokens[:] = [uuid.uuid4()]
        with autocommit(engine) as connection:
            return claim(
                connection,
                plain or keyed,
                handlers=handlers(),
                holder=holder_of(os.getpid()),
                lease_seconds=current.ingest_lease_seconds,
                token=tokens[0],
                keyed=not plain,
                durable=owned is not None,
            )

    try:
        claimed = wait_for_ledger(attempt)
        failpoint("ingest.after_claim")
        count("skipped", len(claimed.skipped))
        count("not_due", len(claimed.not_due))
        # A rolling deploy: another worker may know the type, or this one after its restart.
        _wake_again(engine, claimed.unhandled, after_seconds=UNHANDLED_SECONDS)
        _wake_again(engine, claimed.next_in_line, after_seconds=NEXT_SECONDS, waits_in_line=True)
        left = _left_to_us(engine, claimed)
        left_plain, left_keyed = (left, keyed + claimed.keyed) if plain else ([], left)
        if owned:
            owned([*left_plain, *left_keyed])
        if claimed.tasks:
            claimed.begin(engine, find(claimed.tasks[0].type), lease_seconds=current.ingest_lease_seconds)
    except BaseException as error:  # a signal may stop the worker here, too
        why = f"it was not started: {type(error).__name__}"
        # After an error, wait a second: the same error would probably happen again at once.
        outcome = Snoozed(1.0, why) if isinstance(error, Exception) else Released(why)
        for token in tokens:
            release_unstarted(engine, token, outcome)
        raise
    return claimed, left_plain, left_keyed


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
        logger.warning("Not left to other workers: %s", str(error).partition("\n")[0])
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


def known_ids(ids: Sequence[Any]) -> list[str]:
    """Drop strings that are not UUIDs, and count them as skipped: they cannot name a task."""
    found = [id_ for id_ in map(str, ids) if ID.fullmatch(id_)]
    count("skipped", len(ids) - len(found))
    return found
