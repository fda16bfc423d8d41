"""The functions that `python` stages may call: only those that were registered, by their registered names.

@stage("store_summary")
def store_summary(given):                       in a module that INGEST_HANDLERS names
    save(given.outputs["summarize"], key=given.key)
    return {"saved": True}                      JSON; later stages can use it

A function may raise what a handler may raise: `Permanent` makes the task DEAD, `Snooze` runs it later, and any other
exception is retried.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from tasks.core.registry import BadHandler, handlers
from workflows.payload import BadWorkflow, PythonStage
from workflows.stage import StageInput, StageOutput

Function = TypeVar("Function", bound=Callable[..., Any])
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")

_registered: dict[str, Callable[[StageInput], Any]] = {}


class UnknownFunction(BadWorkflow):
    """No function is registered under this name."""


def stage(name: str) -> Callable[[Function], Function]:
    """Register a function for `python` stages."""

    def register(function: Function) -> Function:
        if not NAME.fullmatch(name):
            raise BadHandler(f"{name!r} is not a valid function name: use 1 to 100 letters, digits and . _ : -")
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise BadHandler(f"{name}: a stage function must take exactly one argument, a StageInput.") from None
        _registered[name] = function
        return function

    return register


def find(name: str) -> Callable[[StageInput], Any]:
    """Return a registered function, or raise UnknownFunction."""
    handlers()  # imports the modules that INGEST_HANDLERS names
    try:
        return _registered[name]
    except KeyError:
        known = ", ".join(sorted(_registered)) or "none"
        raise UnknownFunction(
            f"No stage function is named {name!r}. Known: {known}. INGEST_HANDLERS must name the function's module."
        ) from None


def check(stage: PythonStage) -> None:
    find(stage.function)


def run(stage: PythonStage, given: StageInput) -> StageOutput:
    return StageOutput(find(stage.function)(given))
