"""The functions that `python` stages may call: those that were registered, by the names they were given, and no others.

@stage("store_summary")
def store_summary(given):                       in a module that INGEST_HANDLERS names
    save(given.outputs["summarize"], key=given.key)
    return {"saved": True}                      JSON; the stages after it see it

It may raise what a handler may: `Permanent` is the end, `Snooze` is later, anything else is tried again.
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
            raise BadHandler(f"{name!r} is no name of a function: letters, digits and . _ : - only, at most 100.")
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise BadHandler(f"{name}: the function of a stage takes one argument, what it is given.") from None
        _registered[name] = function
        return function

    return register


def find(name: str) -> Callable[[StageInput], Any]:
    handlers()  # the modules that register something are imported now, if they are not yet
    try:
        return _registered[name]
    except KeyError:
        known = ", ".join(sorted(_registered)) or "none"
        raise UnknownFunction(
            f"There is no function {name!r} for a stage. Known: {known}. INGEST_HANDLERS names the modules with them."
        ) from None


def check(asked: PythonStage) -> None:
    find(asked.function)


def run(asked: PythonStage, given: StageInput) -> StageOutput:
    return StageOutput(find(asked.function)(given))
