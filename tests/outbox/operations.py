"""The five operations of a lease holder in one shape, so that one test can check all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from outbox import lease
from outbox.lease import Db

NEXT_ATTEMPT = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Operation:
    """One operation, with arbitrary values."""

    name: str
    one: Callable[[Db, int, str, uuid.UUID | None], bool]
    many: Callable[[Db, Sequence[int], str, uuid.UUID | None], set[int]]


OPERATIONS = (
    Operation(
        "ack",
        lambda db, i, worker, token: lease.ack_sent(db, i, worker, "x", lease_token=token),
        lambda db, ids, worker, token: lease.ack_sent_many(db, dict.fromkeys(ids, "x"), worker, lease_token=token),
    ),
    Operation(
        "retry",
        lambda db, i, worker, token: lease.fail_retry(db, i, worker, "no", NEXT_ATTEMPT, lease_token=token),
        lambda db, ids, worker, token: lease.fail_retry_many(
            db, dict.fromkeys(ids, ("no", NEXT_ATTEMPT)), worker, lease_token=token
        ),
    ),
    Operation(
        "dead",
        lambda db, i, worker, token: lease.mark_dead_by_worker(db, i, worker, "no", lease_token=token),
        lambda db, ids, worker, token: lease.mark_dead_many(db, dict.fromkeys(ids, "no"), worker, lease_token=token),
    ),
    Operation(
        "renew",
        lambda db, i, worker, token: lease.renew_lease(db, i, worker, lease_token=token),
        lambda db, ids, worker, token: lease.renew_lease_many(db, ids, worker, lease_token=token),
    ),
    Operation(
        "release",
        lambda db, i, worker, token: lease.release_lease(db, i, worker, lease_token=token),
        lambda db, ids, worker, token: lease.release_lease_many(db, ids, worker, lease_token=token),
    ),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
