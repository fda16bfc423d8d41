"""The sinks of a task of an async handler: `await task.sink(name).run(…)`. A sink is used in a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from sinks.task_sinks import TaskSinks
from tasks.core.async_steps import InThread


class AsyncSinks:
    """Opens sinks whose methods are awaited."""

    def __init__(self, sinks: TaskSinks, in_thread: InThread) -> None:
        self._sinks = sinks
        self._in_thread = in_thread

    def open(self, name: str) -> Any:
        return AsyncSink(partial(self._sinks.open, name), self._in_thread)


class AsyncSink:
    """One sink. It is opened when it is first used, because that may ask the ledger."""

    def __init__(self, open_sink: Callable[[], Any], in_thread: InThread) -> None:
        self._open_sink = open_sink
        self._in_thread = in_thread

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        def use(*arguments: Any, **options: Any) -> Any:
            return getattr(self._open_sink(), method)(*arguments, **options)

        return partial(self._in_thread, use)
