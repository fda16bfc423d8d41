"""Show what a benchmark is doing: a changing line on a terminal, else one line for each step as it begins."""

# ruff: noqa: PLC0415 - settings and SQLAlchemy load slowly

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commands.output import on_stderr


@contextmanager
def running_bench() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a step on stderr. Leave no program behind at the end, also after a signal."""
    from embedded.leftovers import leaving_nothing_behind

    with leaving_nothing_behind(), _showing_steps() as show:
        show("starting servers …")
        yield show


@contextmanager
def _showing_steps() -> Iterator[Callable[[str], None]]:
    if on_stderr.is_terminal:
        with on_stderr.status("") as status:
            yield status.update
        return
    began_at = time.monotonic()

    def print_step(step: str) -> None:
        on_stderr.print(f"{time.monotonic() - began_at:6.1f} s  {step}", markup=False, highlight=False, soft_wrap=True)

    yield print_step
