"""Handlers: the functions that run tasks, by the type of the task.

@handler("invoice.import", max_attempts=5)
def import_invoice(task, db): …                 inside the ledger's transaction: effect and SUCCEEDED commit together

@handler("invoice.bulk", batch=500, many=True)
def import_invoices(tasks, db): …               a batch handler gets the whole batch

@handler("crm.sync", transactional=False, backoff=[60, 300], permanent=[NoSuchCustomer])
def sync(task): …                               outside a transaction: network calls, durable steps (`steps.py`)

@handler("crm.fetch", concurrency=100)
async def fetch(task): …                        up to 100 tasks at once in one event loop, outside a transaction

@handler("mail.send", transactional=False, rate="100/m", max_running=5, limit_by="tenant")
def send(task): …                               limits over all workers (`limits.py`)

@handler("report.nightly", schedule="0 3 * * *", timezone="Europe/Berlin")
def report(task, db): …                         each occurrence is a task (`schedule_rules.py`)

`INGEST_HANDLERS` names the modules with handlers. Ours are in `tasks/handlers/`, `documents/` and `workflows/`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import settings
from models.errors import Misuse, shorten
from tasks.core.limits import LARGEST, LONGEST_FIELD, Limits, Rate
from tasks.core.schedule_rules import Schedule, declared

Function = TypeVar("Function", bound=Callable[..., Any])
ErrorClass = type[Exception]
Errors = tuple[ErrorClass, ...]
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")
DEFAULT_BATCH: Final = 1000
DEFAULT_CONCURRENCY: Final = 100
DEFAULT_PRIORITY: Final = 5
SOFT_LIMIT_SECONDS: Final = 600.0
HARD_AFTER_SOFT_SECONDS: Final = 30.0
LONGEST_SECONDS: Final = 100 * 366 * 86_400
LARGEST_BATCH: Final = 100_000
SHIPPED: Final = ("tasks.handlers.demo", "tasks.handlers.http", "documents.handler", "workflows.handler")


class UnknownType(Misuse):
    """No handler is registered for this task type.

    The type is misspelt, or INGEST_HANDLERS does not name the module with its handler: neither here nor in a worker.
    """

    code = "unknown_type"
    remedy = "Correct the type, or add the handler's module to INGEST_HANDLERS of the workers and restart them."


class BadHandler(Misuse):
    """A handler is declared wrongly.

    The arguments of `@handler` or of its function are invalid, two functions have the same type, or INGEST_HANDLERS
    names a missing module.
    """

    code = "bad_handler"
    remedy = "Correct the declaration that the message names; docs/handlers.md lists all options."
    http_status = 500  # not the fault of the client that submits


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, and how to run its tasks."""

    type: str
    function: Callable[..., Any]
    transactional: bool = True
    many: bool = False
    batch: int = DEFAULT_BATCH
    queue: str = "ingest"
    max_attempts: int | None = None  # None: INGEST_MAX_ATTEMPTS
    backoff: tuple[float, ...] | None = None  # seconds to wait after each failure; the last value repeats
    retriable: Errors = ()
    permanent: Errors = ()
    skip_dead: bool = False  # a DEAD task does not block the others of its partition key
    soft_limit_seconds: float = SOFT_LIMIT_SECONDS  # then the handler gets an exception
    hard_limit_seconds: float = SOFT_LIMIT_SECONDS + HARD_AFTER_SOFT_SECONDS  # then its process is killed
    priority: int = DEFAULT_PRIORITY  # of tasks that are submitted without one
    limits: Limits | None = None  # over all workers
    schedule: Schedule | None = None
    is_async: bool = False  # its tasks run in one event loop, up to `batch` of them at once

    def is_permanent(self, error: BaseException) -> bool:
        """Return True if the task must not be retried after this error.

        The most specific class in `retriable` or `permanent` decides. An error of neither list is retried, except if
        only `retriable` was given: then that list is complete.
        """
        for kind in error.__class__.__mro__:
            if kind in self.permanent:
                return True
            if kind in self.retriable:
                return False
        return bool(self.retriable and not self.permanent)


_registered: dict[str, Handler] = {}
_GENERATORS: Final = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def handler(
    type: str,
    *,
    transactional: bool | None = None,
    many: bool = False,
    batch: int | None = None,
    concurrency: int | None = None,
    queue: str = "ingest",
    max_attempts: int | None = None,
    backoff: Sequence[float] | None = None,
    retriable: Sequence[ErrorClass] = (),
    permanent: Sequence[ErrorClass] = (),
    skip_dead: bool = False,
    soft_limit_seconds: float = SOFT_LIMIT_SECONDS,
    hard_limit_seconds: float | None = None,
    priority: int = DEFAULT_PRIORITY,
    max_running: int | None = None,
    rate: str | None = None,
    limit_by: str | None = None,
    schedule: str | None = None,
    timezone: str | None = None,
    every: timedelta | None = None,
    catch_up: str = "once",
    payload: Mapping[str, Any] | None = None,
) -> Callable[[Function], Function]:
    """Register a function for a type of task. A type has one handler; reloading its module replaces it.

    A plain function is transactional unless `transactional=False` is given; an `async def` function never is.
    `concurrency` is for `async def` functions, `batch` for all others.
    `timezone`, `catch_up` and `payload` belong to `schedule` or `every`: docs/handlers.md, Schedules.
    """

    if callable(type):
        raise BadHandler(f'Write @handler("some.type") above {_place(type)}: without a type it would register nothing.')

    def register(function: Function) -> Function:
        hard = hard_limit_seconds if hard_limit_seconds is not None else soft_limit_seconds + HARD_AFTER_SOFT_SECONDS
        is_async = inspect.iscoroutinefunction(function)
        made = Handler(
            type, function, not is_async if transactional is None else transactional, many,
            _batch(type, batch, concurrency, is_async=is_async), queue, max_attempts,
            tuple(backoff) if backoff is not None else None, tuple(retriable), tuple(permanent),
            skip_dead, soft_limit_seconds, hard, priority, _limits(type, max_running, rate, limit_by),
            _schedule(type, schedule, every, timezone, catch_up, payload), is_async,
        )  # fmt: skip
        _check(made)
        before = _registered.get(type)
        if before and _name(before.function) != _name(function):
            both = f"{_place(before.function)} and {_place(function)}"
            raise BadHandler(f"The type {type!r} has two handlers: {both}. Rename the type of one, or remove it.")
        _registered[type] = made
        return function

    return register


def find(type: str) -> Handler:
    """Return the handler of a type, or raise UnknownType."""
    try:
        return handlers()[type]
    except KeyError:
        known = ", ".join(sorted(handlers())) or "none"
        raise UnknownType(
            f"There is no handler for {shorten(type)}. Known: {known}. INGEST_HANDLERS names the modules with handlers."
        ) from None


def find_or_default(type: str) -> Handler:
    """Return the handler of a type, or one with the default options if this process has none."""
    return handlers().get(type) or Handler(type, lambda *_: None)


def handlers() -> Mapping[str, Handler]:
    """Return all handlers by type. The first call imports their modules."""
    _load(settings.current().ingest_handlers)
    return _registered


@cache
def _load(modules: tuple[str, ...]) -> None:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # `celery` has it there while it imports the application, and removes it afterwards
    for name in (*SHIPPED, *modules):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            raise BadHandler(f"INGEST_HANDLERS names the module {name!r}, which does not exist.") from None


def _batch(type: str, batch: int | None, concurrency: int | None, *, is_async: bool) -> int:
    """Return how many tasks are claimed together at most. Raises BadHandler."""
    if is_async:
        _require(type, batch is None, "an async handler has no batch; `concurrency` says how many tasks run at once")
        return DEFAULT_CONCURRENCY if concurrency is None else concurrency
    _require(type, concurrency is None, "concurrency needs a function that is declared with `async def`")
    return DEFAULT_BATCH if batch is None else batch


def _limits(type: str, max_running: int | None, rate: str | None, limit_by: str | None) -> Limits | None:
    """Return the limits of a handler, or None if it has none. Raises BadHandler."""
    if max_running is None and rate is None:
        _require(type, limit_by is None, "limit_by needs rate or max_running")
        return None
    is_count = max_running is None or (isinstance(max_running, int) and 1 <= max_running <= LARGEST)
    _require(type, is_count, f"max_running must be a whole number from 1 to {LARGEST:,}")
    is_field = limit_by is None or (isinstance(limit_by, str) and 1 <= len(limit_by) <= LONGEST_FIELD)
    _require(type, is_field, f"limit_by must be the name of a field with at most {LONGEST_FIELD} characters")
    try:
        parsed = None if rate is None else Rate.parse(rate)
    except ValueError as error:
        raise BadHandler(f"The handler {type!r} is invalid: rate must be {error}.") from None
    return Limits(type, max_running, parsed, limit_by)


def _require(type: str, is_kept: object, rule: str) -> None:
    if not is_kept:
        raise BadHandler(f"The handler {type!r} is invalid: {rule}.")


def _schedule(type: str, *options: Any) -> Schedule | None:
    try:
        return declared(*options)
    except Misuse as error:
        raise BadHandler(f"The handler {type!r} is invalid: {error.message.rstrip('.')}.") from None


def _check(made: Handler) -> None:
    """Raise BadHandler for the first rule that the handler breaks."""

    def require(is_kept: object, rule: str) -> None:
        _require(made.type, is_kept, rule)

    is_type = isinstance(made.type, str) and NAME.fullmatch(made.type)
    require(is_type, "a type has letters, digits and . _ : - only, and at most 100 characters")
    require(made.transactional or not made.many, "a batch handler must be transactional")
    require(not (made.is_async and made.transactional), "an async handler cannot be transactional")
    size = "concurrency" if made.is_async else "batch"
    require(1 <= made.batch <= LARGEST_BATCH, f"{size} must be between 1 and {LARGEST_BATCH:,}")
    require(made.max_attempts is None or made.max_attempts >= 1, "max_attempts must be at least 1")
    require(made.priority in range(10), "priority must be a whole number from 0 to 9")
    are_errors = all(inspect.isclass(kind) and issubclass(kind, Exception) for kind in made.retriable + made.permanent)
    require(are_errors, "retriable and permanent must be exception classes")
    require(not set(made.retriable) & set(made.permanent), "an exception class is both retriable and permanent")
    are_waits = all(0 <= seconds <= LONGEST_SECONDS for seconds in made.backoff or ())
    require(are_waits, "backoff must be seconds between 0 and a hundred years")
    are_limits = 0 < made.soft_limit_seconds <= min(made.hard_limit_seconds, LONGEST_SECONDS)
    require(are_limits, "the soft limit must be positive, and at most the hard limit and a hundred years")
    is_plain = not any(is_kind(made.function) for is_kind in _GENERATORS)
    require(is_plain, "its function is a generator; calling it would do nothing")
    one = "(task, db), or (task) with transactional=False" if made.transactional else "(task)"
    arguments = "(tasks, db)" if made.many else one
    require(_count_arguments(made.function) == 1 + made.transactional, f"its function must take {arguments}")


def _count_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments the function requires."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Return what stays the same when the module of a function is loaded again."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))


def _place(function: Callable[..., Any]) -> str:
    """Return the name of a function, and the file and line where it begins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return ".".join(_name(function)) + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
