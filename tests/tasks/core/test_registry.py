"""An invalid handler is refused when it is declared, not when its tasks run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from tasks.core.registry import BadHandler, handler, handlers
from tasks.core.task import Task
from tests.servers import ServersOfTests
from tests.tasks.work import insert


@pytest.mark.parametrize(
    "how",
    [
        {"backoff": [60, math.inf]},
        {"backoff": [math.nan]},
        {"backoff": [-1]},
        {"backoff": [1e12]},
        {"soft_limit_seconds": math.inf},
        {"soft_limit_seconds": math.nan},
        {"batch": 0},
        {"batch": 10**10},
    ],
    ids=str,
)
def test_a_number_that_the_ledger_or_the_timer_cannot_use_is_refused(
    how: dict[str, Any], stack: ServersOfTests
) -> None:
    with pytest.raises(BadHandler):
        handler("test.bad", **how)(insert)
    assert "test.bad" not in handlers()


async def asynchronous(_task: Task, _db: Session) -> None:
    """Would never be awaited."""


def generator(_task: Task, _db: Session) -> Iterator[None]:
    yield


async def both(_task: Task, _db: Session) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [asynchronous, generator, both])
def test_a_function_that_would_do_nothing_when_called_is_refused(function: Any) -> None:
    with pytest.raises(BadHandler):
        handler("test.bad")(function)
