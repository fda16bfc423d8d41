"""`tasks.ingest(ids)`: what a worker does with one message.

    guard ─► batch of one kind ─► handler, settle ─► what is left of the ids, until nothing is

The message may be a duplicate, late, or made by hand: the guard decides. It is acknowledged when everything in it is
settled or refused; if this process dies before, the broker or reclaim brings the tasks back.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import settings
from failpoint import failpoint
from models.engine import autocommit
from models.errors import CeleriacError
from tasks.core import wakeups
from tasks.core.batch_size import is_kept_small
from tasks.core.holders import holder_of
from tasks.core.outcomes import Released, Snoozed
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.registry import find, handlers
from tasks.core.result_metrics import count
from tasks.execution import claim, claim_partitioned
from tasks.execution.batch import Batch
from tasks.execution.claim import Claim
from tasks.execution.release import give_back
from tasks.execution.run_handler import is_serialization_failure
from tasks.execution.unsettled import REPEATS

logger = logging.getLogger(__name__)

Owned = Callable[[Sequence[uuid.UUID]], None]
UNHANDLED_SECONDS: Final = 30.0
Id = str | uuid.UUID
ID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def ingest(engine: Engine, ids: Sequence[Any], *, owned: Owned | None = None) -> None:
    """Run what may run of these tasks: first those that wait for nobody, then those with a partition key.

    `owned` is told after each claim what is left to claim: the ledger owns the rest from there, durably, and whoever
    delivered the ids may forget those.
    """
    keyed = _claim_and_run(engine, known_ids(ids), claim.claim, owned)
    _claim_and_run(engine, keyed, claim_partitioned.claim_keyed, owned)


def _claim_and_run(
    engine: Engine, ids: Sequence[Id], claim: Callable[..., Claim], owned: Owned | None
) -> list[uuid.UUID]:
    """Batch by batch; returns the ids that another kind of claim is for."""
    current = settings.current()
    keyed: list[uuid.UUID] = []
    while ids:
        token = uuid.uuid4()
        try:
            claimed = _repeated_if_asked(
                engine,
                partial(
                    claim,
                    ids=ids,
                    handlers=handlers(),
                    holder=holder_of(os.getpid()),
                    lease_seconds=current.ingest_lease_seconds,
                    token=token,
                    durable=owned is not None,
                ),
            )
            failpoint("ingest.after_claim")
            count("skipped", len(claimed.skipped))
            count("not_due", len(claimed.not_due))
            # A rolling deploy: another worker may know their type, or this one tomorrow.
            _wake_again(engine, claimed.unhandled, after_seconds=UNHANDLED_SECONDS)
            # Their turn is about to come.
            _wake_again(engine, claimed.next_in_line, after_seconds=NEXT_SECONDS, waits_in_line=True)
            keyed += claimed.keyed
            ids = _for_others(engine, claimed)
            if owned:
                owned([*ids, *keyed])
            batch = Batch(engine, claimed, find(claimed.tasks[0].type), current) if claimed.tasks else None
        except BaseException as error:  # a worker that is told to stop waits for a claim as often as for anything else
            why = f"it was not started: {type(error).__name__}"
            give_back(engine, current, token, Snoozed(1.0, why) if isinstance(error, Exception) else Released(why))
            raise
        if batch:
            batch.run()
    return keyed


def _repeated_if_asked(engine: Engine, claim: Callable[[Connection], Claim]) -> Claim:
    """A database whose default is REPEATABLE READ or above may ask for that (P14); an error would lose the message."""
    for _ in range(REPEATS - 1):
        try:
            with autocommit(engine) as connection:
                return claim(connection)
        except DBAPIError as error:
            if not is_serialization_failure(error):
                raise
    with autocommit(engine) as connection:
        return claim(connection)


def _for_others(engine: Engine, claimed: Claim) -> list[uuid.UUID]:
    """Where a slow type made the batch small, the rest is woken again for a free worker. Returns what is left to us.

    That is all of it if they cannot be woken for: an error would leave what is claimed to reclaim, and a task that was
    alone in its batch would be charged with that (P5).
    """
    if not claimed.tasks or not is_kept_small(find(claimed.tasks[0].type), len(claimed.tasks)):
        return claimed.left
    try:
        _wake_again(engine, claimed.left, queues=[claimed.tasks[0].queue], restarts_grace=True)
    except (DBAPIError, CeleriacError) as error:
        logger.warning("not left to others: %s", str(error).partition("\n")[0])
        return claimed.left
    return []


def _wake_again(engine: Engine, ids: Sequence[uuid.UUID], *, queues: Sequence[str] = (), **how: Any) -> None:
    """Wake-ups for these queues that are due at once are ours to publish."""
    if ids:
        with Session(engine) as db:
            wakeups.wake_again(db, ids, queues=queues, **how)
            db.commit()


def known_ids(ids: Sequence[Any]) -> list[str]:
    """What is no id is nobody's task."""
    found = [id_ for id_ in map(str, ids) if ID.fullmatch(id_)]
    count("skipped", len(ids) - len(found))
    return found
