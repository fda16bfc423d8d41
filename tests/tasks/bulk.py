"""Order bulk actions and do them in this process."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from models.bulk_actions import BulkVerb
from models.clock import now
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks.operations import bulk_actions
from tasks.operations.bulk_actions import BulkRow, Order, Preview
from tasks.operations.bulk_run import BulkClaim, claim_next, work_off
from tasks.operations.listing import TaskFilter

EVERYTHING = TaskFilter()


def previewed(verb: BulkVerb, chosen: TaskFilter = EVERYTHING) -> Preview:
    with engine().connect() as connection:
        return bulk_actions.preview(connection, verb, chosen, as_of=now(connection))


def ordered(verb: BulkVerb = BulkVerb.REQUEUE, chosen: TaskFilter = EVERYTHING, **how: Any) -> uuid.UUID:
    """Write down an action, as of now."""
    with engine().begin() as connection:
        values = {"query": "", "as_of": now(connection), "reason": "mended", **how}
        order = Order(verb, chosen=chosen, **values)
        bulk_actions.create(connection, order, actor="console:ann")
    return order.id


def claimed() -> BulkClaim:
    claim = claim_next(engine())
    assert claim is not None, "no action waits"
    return claim


def worked_off(claim: BulkClaim | None = None, *, stopped: threading.Event | None = None) -> BulkRow:
    """Do the action of this claim, or the one that has waited longest, and return what its row says then."""
    claim = claim or claimed()
    work_off(engine(), claim, stopped=stopped or threading.Event())
    assert after_commit_publisher().wait_until_idle(60)
    return row(claim.action.id)


def done(verb: BulkVerb = BulkVerb.REQUEUE, chosen: TaskFilter = EVERYTHING, **how: Any) -> BulkRow:
    ordered(verb, chosen, **how)
    return worked_off()


def row(id_: uuid.UUID) -> BulkRow:
    with engine().connect() as connection:
        return bulk_actions.read(connection, id_)
