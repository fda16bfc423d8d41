"""Durable steps of an async handler. They are those of `steps.py`; what waits for the ledger runs in a thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from models.errors import LeaseLost
from tasks.core.steps import NOT_DONE, Steps

Item = TypeVar("Item")
InThread = Callable[..., Awaitable[Any]]
_END: Final = object()


class AsyncSteps:
    """The steps of one running task of an async handler. `in_thread` calls a function that waits for the ledger."""

    def __init__(self, steps: Steps, in_thread: InThread) -> None:
        self._steps = steps
        self.held = steps.held
        self._in_thread = in_thread

    async def run(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the stored result, or call the function and store what it returns.

        A plain function is called in a thread, because it may block. If the task is cancelled meanwhile, its thread
        ends when the function returns, and the result is not stored.
        """
        stored = await self._in_thread(self._steps.find, name)
        if stored is not NOT_DONE:
            return stored
        if inspect.iscoroutinefunction(function):
            result = await function(*arguments, **options)
        else:
            result = await asyncio.to_thread(function, *arguments, **options)
            if inspect.isawaitable(result):  # a lambda or a partial that calls an async function
                result = await result
        return await self._in_thread(self._steps.keep, name, result)

    async def resume(self, name: str, items: Iterable[Item], *, every: int) -> AsyncIterator[Item]:
        """Yield the items that are not done."""
        left: Iterator[Item] = self._steps.resume(name, items, every=every)
        while (item := await self._in_thread(next, left, _END)) is not _END:
            yield item

    def check_lease(self) -> None:
        """Raise LeaseLost if this process knows that it may no longer run the task. The ledger is not asked."""
        if not self.held.is_good:
            raise LeaseLost
