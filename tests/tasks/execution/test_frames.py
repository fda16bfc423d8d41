"""A traceback of a user's function stays short: few frames of ours lie between the Celery task and the function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy.orm import Session

from settings import ROOT
from tasks.celery_tasks import ingest
from tasks.core.task import Task
from tests.tasks.deliveries import handled, submitted
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")

MOST: Final = 6
# docs/internals.md has a diagram of these calls.
IN_A_TRANSACTION: Final = ["deliver", "run", "run_in_transaction", "_attempt", "call_handler", "SoftLimit.call"]
OUTSIDE: Final = ["deliver", "run", "run_outside", "call_handler", "SoftLimit.call"]


def frames_below_the_celery_task() -> list[str]:
    """Return the functions between the Celery task and the function that calls this one, outermost first."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame.f_code is not ingest.run.__code__:
        path = Path(frame.f_code.co_filename)
        assert path.is_relative_to(ROOT), f"a frame of another package: {path}"
        found.insert(0, frame.f_code.co_qualname)
        assert frame.f_back is not None, f"{ingest.name} is not on the stack"
        frame = frame.f_back
    return found


def seen_by(count: int, *, transactional: bool = True, many: bool = False) -> list[list[str]]:
    """Give one message to the function of the Celery task; return the frames that each call of the handler has seen."""
    seen: list[list[str]] = []

    def inside(_task: Any, _db: Session) -> None:
        seen.append(frames_below_the_celery_task())

    def outside(_task: Task) -> None:
        seen.append(frames_below_the_celery_task())

    function: Any = inside if transactional else outside
    with handled("test.frames", function, transactional=transactional, many=many):
        ingest.run([str(id_) for id_ in submitted(count, "test.frames")])
    assert rows() == [("SUCCEEDED", 0)] * count
    return seen


@pytest.mark.parametrize("count", [1, 3])
def test_a_transactional_handler_is_at_most_six_calls_away_from_the_celery_task(count: int) -> None:
    assert seen_by(count) == [IN_A_TRANSACTION] * count
    assert len(IN_A_TRANSACTION) <= MOST


def test_a_batch_handler_is_as_near_as_any_other() -> None:
    assert seen_by(3, many=True) == [IN_A_TRANSACTION]


@pytest.mark.parametrize("count", [1, 3])
def test_a_handler_outside_a_transaction_is_at_most_six_calls_away_from_the_celery_task(count: int) -> None:
    assert seen_by(count, transactional=False) == [OUTSIDE] * count
    assert len(OUTSIDE) <= MOST
