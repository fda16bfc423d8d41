"""Handlers: what a user writes, by the type of the tasks that it runs.

@handler("invoice.import", max_attempts=5)
def import_invoice(task, db): …                 inside the ledger's transaction: effect and SUCCEEDED commit together

@handler("invoice.bulk", batch=500, many=True)
def import_invoices(tasks, db): …               the whole batch at once

@handler("crm.sync", transactional=False, backoff=[60, 300], permanent=[NoSuchCustomer])
def sync(task): …                               outside any transaction: network calls, durable steps (`steps.py`)

`INGEST_HANDLERS` names the modules that hold them; ours are in `tasks/handlers/`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import settings
from models.errors import Misuse

Function = TypeVar("Function", bound=Callable[..., Any])
ErrorClass = type[Exception]
Errors = tuple[ErrorClass, ...]
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")
DEFAULT_BATCH: Final = 100
SOFT_LIMIT_SECONDS: Final = 600.0
HARD_AFTER_SOFT_SECONDS: Final = 30.0
LONGEST_SECONDS: Final = 100 * 366 * 86_400
LARGEST_BATCH: Final = 100_000
SHIPPED: Final = ("tasks.handlers.demo", "tasks.handlers.http", "documents.handler", "workflows.handler")


class UnknownType(Misuse):
    """No handler is registered for this type of task."""

    code = "unknown_type"


class BadHandler(Misuse):
    """A handler cannot be used as it is declared."""

    code = "bad_handler"
    http_status = 500  # whoever submits did nothing wrong


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, and how its tasks are run."""

    type: str
    function: Callable[..., Any]
    transactional: bool = True
    many: bool = False
    batch: int = DEFAULT_BATCH
    queue: str = "ingest"
    max_attempts: int | None = None  # None: INGEST_MAX_ATTEMPTS
    backoff: tuple[float, ...] | None = None  # seconds after each failure, the last one again and again
    retriable: Errors = ()
    permanent: Errors = ()
    skip_dead: bool = False  # a DEAD task does not hold up the others of its partition key
    soft_limit_seconds: float = SOFT_LIMIT_SECONDS  # the handler gets an exception
    hard_limit_seconds: float = SOFT_LIMIT_SECONDS + HARD_AFTER_SOFT_SECONDS  # its process is killed

    def dies_of(self, error: BaseException) -> bool:
        """Whether trying again would be useless: the nearest class that was named decides.

        What is in neither is tried again, unless only `retriable` was given: then it is a list of all that is.
        """
        for kind in error.__class__.__mro__:
            if kind in self.permanent:
                return True
            if kind in self.retriable:
                return False
        return bool(self.retriable and not self.permanent)


_registered: dict[str, Handler] = {}
_NOT_AT_ONCE: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def handler(
    type: str,
    *,
    transactional: bool = True,
    many: bool = False,
    batch: int = DEFAULT_BATCH,
    queue: str = "ingest",
    max_attempts: int | None = None,
    backoff: Sequence[float] | None = None,
    retriable: Sequence[ErrorClass] = (),
    permanent: Sequence[ErrorClass] = (),
    skip_dead: bool = False,
    soft_limit_seconds: float = SOFT_LIMIT_SECONDS,
    hard_limit_seconds: float | None = None,
) -> Callable[[Function], Function]:
    """Register a function for a type of task."""

    def register(function: Function) -> Function:
        hard = hard_limit_seconds if hard_limit_seconds is not None else soft_limit_seconds + HARD_AFTER_SOFT_SECONDS
        made = Handler(
            type, function, transactional, many, batch, queue, max_attempts,
            tuple(backoff) if backoff is not None else None, tuple(retriable), tuple(permanent),
            skip_dead, soft_limit_seconds, hard,
        )  # fmt: skip
        _check(made)
        _registered[type] = made
        return function

    return register


def find(type: str) -> Handler:
    """The handler of a type. `UnknownType` names those that there are."""
    try:
        return handlers()[type]
    except KeyError:
        known = ", ".join(sorted(handlers())) or "none"
        raise UnknownType(
            f"There is no handler for {type!r}. Known: {known}. INGEST_HANDLERS names the modules with handlers."
        ) from None


def find_or_default(type: str) -> Handler:
    """Also of a type that nobody here knows: its tasks wait as long as any."""
    return handlers().get(type) or Handler(type, lambda *_: None)


def handlers() -> Mapping[str, Handler]:
    """All of them; the modules are imported when they are first needed."""
    _load(settings.current().ingest_handlers)
    return _registered


@cache
def _load(modules: tuple[str, ...]) -> None:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # `celery` looks for its application here, and forgets the place afterwards
    for name in (*SHIPPED, *modules):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            raise BadHandler(f"INGEST_HANDLERS names {name!r}, and there is no such module.") from None


def _check(made: Handler) -> None:
    if not NAME.fullmatch(made.type):
        raise BadHandler(f"{made.type!r} is no name of a type: letters, digits and . _ : - only, at most 100.")
    if made.many and not made.transactional:
        raise BadHandler(f"{made.type}: a handler of many tasks is transactional.")
    if not 1 <= made.batch <= LARGEST_BATCH:
        raise BadHandler(f"{made.type}: a batch has at least one task, and at most {LARGEST_BATCH:,}.")
    if made.max_attempts is not None and made.max_attempts < 1:
        raise BadHandler(f"{made.type}: max_attempts is at least 1.")
    if not all(inspect.isclass(kind) and issubclass(kind, Exception) for kind in made.retriable + made.permanent):
        raise BadHandler(f"{made.type}: retriable and permanent are classes of exceptions.")
    if both := set(made.retriable) & set(made.permanent):
        raise BadHandler(f"{made.type}: {both.pop().__name__} cannot be both retriable and permanent.")
    if not all(0 <= seconds <= LONGEST_SECONDS for seconds in made.backoff or ()):
        raise BadHandler(f"{made.type}: backoff is how many seconds to wait, from 0 to a hundred years.")
    if not 0 < made.soft_limit_seconds <= min(made.hard_limit_seconds, LONGEST_SECONDS):
        raise BadHandler(
            f"{made.type}: the soft limit is positive, not above the hard one, and at most a hundred years."
        )
    if any(kind(made.function) for kind in _NOT_AT_ONCE):
        raise BadHandler(f"{made.type}: its function is async or a generator, and calling it would do nothing.")
    wanted = 2 if made.transactional else 1
    positional = [p for p in inspect.signature(made.function).parameters.values() if p.default is p.empty]
    if len([p for p in positional if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) != wanted:
        arguments = "(tasks, db)" if made.many else "(task, db)" if made.transactional else "(task)"
        raise BadHandler(f"{made.type}: its function takes {arguments}.")
