"""Handlers that cannot be run as they are declared are refused when they are declared, and not task by task."""

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
def test_numbers_that_the_ledger_or_the_timer_would_refuse_are_refused_at_the_start(
    how: dict[str, Any], stack: ServersOfTests
) -> None:
    with pytest.raises(BadHandler):
        handler("test.bad", **how)(insert)
    assert "test.bad" not in handlers()


async def asynchronous(_task: Task, _db: Session) -> None:
    """Nobody awaits it."""


def generator(_task: Task, _db: Session) -> Iterator[None]:
    yield


async def both(_task: Task, _db: Session) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [asynchronous, generator, both])
def test_a_function_that_does_nothing_when_it_is_called_is_refused_at_the_start(function: Any) -> None:
    with pytest.raises(BadHandler):
        handler("test.bad")(function)
