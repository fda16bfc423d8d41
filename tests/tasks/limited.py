"""Claim tasks whose handler has limits, and follow their wake-ups, without Celery."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks.core.registry import Handler, handlers
from tasks.execution.claim import Claim
from tasks.execution.limits import claim_admitted
from tasks.recovery import limited_tasks
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, handled, scalar, submitted
from tests.tasks.registrations import registered
from tests.tasks.work import Wakeup, wakeups

TYPE = "test.limited"
NOW = "SELECT ledger.ledger_now()"


def nothing(_task: Any) -> None:
    """A handler without an effect."""


@contextmanager
def limited(function: Callable[..., Any] = nothing, *, type: str = TYPE, **how: Any) -> Iterator[Handler]:
    """Register a handler in this process, and in the ledger as a worker does, for the duration of the block."""
    how = {"transactional": False, **how}
    with handled(type, function, **how) as made:
        registered({type: made})
        yield made


def for_tenant(name: str, count: int = 1, **how: Any) -> list[uuid.UUID]:
    return submitted(count, TYPE, {"tenant": name}, **how)


def admitted(ids: Sequence[uuid.UUID]) -> Claim:
    """Claim tasks with limits as another worker would."""
    with Session(engine()) as db:
        found = admitted_in(db, ids)
        db.commit()
    return found


def admitted_in(db: Session, ids: Sequence[uuid.UUID]) -> Claim:
    how: Any = {"handlers": handlers(), "holder": "another:1", "lease_seconds": 60, "token": uuid.uuid4()}
    return claim_admitted(db, ids, **how)


def ids_of(claim: Claim) -> list[uuid.UUID]:
    return [task.id for task in claim.tasks]


def running() -> int:
    return int(scalar("SELECT count(*) FROM ledger.ingest_task WHERE status = 'RUNNING'"))


def waiting() -> int:
    return int(scalar("SELECT count(*) FROM ledger.ingest_task WHERE limited_at IS NOT NULL AND status = 'QUEUED'"))


def last_event() -> int:
    return int(scalar("SELECT coalesce(max(id), 0) FROM ledger.outbox_event"))


def new_wakeups(after: int) -> list[Wakeup]:
    return wakeups(f"id > {after}")


def woken_ids(after: int) -> list[uuid.UUID]:
    """Return the tasks that were woken since this event, for now or for later."""
    return [id_ for wakeup in new_wakeups(after) for id_ in wakeup.ids]


def repaired(*, depth: int = 0) -> int:
    """Run the part of reclaim that looks after waiting tasks, as if every queue had `depth` messages."""

    def given(queues: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(queues, depth)

    assert after_commit_publisher().wait_until_idle(20)
    woken = limited_tasks.repair(engine(), settings.current(), depths=given)
    assert after_commit_publisher().wait_until_idle(20)
    return woken


def follow_wakeups(stack: ServersOfTests, *, after: int = 0, most: int = 1000) -> list[Wakeup]:
    """Deliver every wake-up after this event once, in the order of its time, and nothing else. Return them.

    The clock is moved to the time of a wake-up for later.
    """
    seen: list[Wakeup] = []
    while left := [each for each in new_wakeups(after) if each.id not in {one.id for one in seen}]:
        assert len(seen) < most, "the wake-ups do not end"
        now: datetime = scalar(NOW)
        first = min(left, key=lambda each: (each.due_at or now, each.id))
        if first.due_at and first.due_at > now:
            move(stack, (first.due_at - now).total_seconds())
        seen.append(first)
        delivered(first.ids)
    return seen
