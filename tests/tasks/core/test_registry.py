"""An invalid handler is refused when it is declared, not when its tasks run."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from tasks.core import registry
from tasks.core.registry import BadHandler, handler, handlers
from tasks.core.task import Task
from tests.nodes.programs import celery, run
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled
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


def generator(_task: Task, _db: Session) -> Iterator[None]:
    yield


async def both(_task: Task, _db: Session) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [generator, both])
def test_a_function_that_would_do_nothing_when_called_is_refused(function: Any) -> None:
    with pytest.raises(BadHandler):
        handler("test.bad")(function)


def without_session(_task: Task) -> None: ...


def with_session(_task: Task, _db: Session) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "rule"),
    [
        (without_session, {}, r"must take \(task, db\), or \(task\) with transactional=False"),
        (without_session, {"many": True}, r"must take \(tasks, db\)$"),
        (with_session, {"transactional": False}, r"must take \(task\)$"),
    ],
    ids=["transactional", "many", "outside"],
)
def test_a_function_with_other_arguments_is_refused_with_the_right_ones(
    function: Any, options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(BadHandler) as refused:
        handler("test.bad", **options)(function)
    assert re.search(rule, refused.value.message.removesuffix("."))


async def asynchronous(_task: Task) -> None: ...


def plain(_task: Task, _db: Session) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "rule"),
    [
        (asynchronous, {"transactional": True}, "cannot be transactional"),
        (asynchronous, {"batch": 10}, "no batch"),
        (asynchronous, {"many": True}, "must be transactional"),
        (asynchronous, {"concurrency": 0}, "concurrency must be between 1"),
        (plain, {"concurrency": 10}, "async def"),
    ],
)
def test_options_that_contradict_an_async_function_are_refused(
    function: Any, options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(BadHandler, match=rule):
        handler("test.bad", **options)(function)


def test_an_async_handler_runs_outside_a_transaction_and_a_hundred_at_once_by_default() -> None:
    with handled("test.async_defaults", asynchronous) as made:
        assert (made.is_async, made.transactional, made.batch) == (True, False, 100)


MODULE = """
from tasks import handler

@handler("test.twice")
def {name}(task, db):
    pass
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two modules that both declare a handler for "test.twice"."""
    names = ["first_of_two", "second_of_two"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(MODULE.format(name="run"))
    monkeypatch.syspath_prepend(tmp_path)
    yield names
    registry._registered.pop("test.twice", None)
    for name in names:
        sys.modules.pop(name, None)


def test_a_type_with_two_handlers_is_refused_and_both_places_are_named(
    modules: list[str], tmp_path: Path, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_HANDLERS", ",".join(modules))
    settings.current.cache_clear()
    with pytest.raises(BadHandler) as refused:
        handlers()
    for name in modules:
        assert f"{name}.run ({tmp_path / name}.py:4)" in refused.value.message
    assert registry._registered["test.twice"].function.__module__ == "first_of_two"


def test_a_worker_does_not_start_with_two_handlers_for_a_type(
    modules: list[str], tmp_path: Path, stack: ServersOfTests
) -> None:
    variables = {"INGEST_HANDLERS": ",".join(modules), "PYTHONPATH": str(tmp_path)}
    done = run(celery("-A", "tasks", "worker", "-P", "solo"), **variables)
    assert done.returncode == BadHandler.exit_code
    assert "The type 'test.twice' has two handlers: first_of_two.run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_that_is_loaded_again_replaces_its_handler(modules: list[str], tmp_path: Path) -> None:
    module = importlib.import_module(modules[0])
    before = registry._registered["test.twice"].function
    (tmp_path / f"{modules[0]}.py").write_text("# one more line\n" + MODULE.format(name="run"))
    importlib.reload(module)
    assert registry._registered["test.twice"].function is module.run is not before


def test_two_functions_of_one_module_cannot_have_the_same_type(tmp_path: Path, modules: list[str]) -> None:
    (tmp_path / "first_of_two.py").write_text(MODULE.format(name="one") + MODULE.format(name="two"))
    with pytest.raises(BadHandler, match=r"first_of_two\.one .*first_of_two\.two "):
        importlib.import_module(modules[0])


def test_a_decorator_without_parentheses_is_refused_instead_of_registering_nothing() -> None:
    with pytest.raises(BadHandler, match=r'Write @handler\("some\.type"\) above tests\.tasks\.work\.insert \('):
        handler(insert)  # type: ignore[arg-type]


@pytest.mark.parametrize("type", [17, None, b"test.bad", "", "a b"])
def test_a_type_that_is_not_a_name_is_refused(type: Any) -> None:
    with pytest.raises(BadHandler, match="a type has letters"):
        handler(type)(insert)


@pytest.mark.parametrize("priority", [-1, 10, 5.5, "5", None])
def test_a_priority_outside_its_range_is_refused(priority: Any) -> None:
    with pytest.raises(BadHandler, match="priority must be"):
        handler("test.bad", priority=priority)(insert)
