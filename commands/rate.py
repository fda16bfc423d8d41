"""How fast an operator wants something to happen: `50/s`, `30/m`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sized
from threading import Event
from typing import Final

import typer

HELP: Final = "50/s, 30/m or 1000/h"
STEPS_PER_SECOND: Final = 5
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(?:/([smh]))?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


def rate(given: str | None) -> float | None:
    """Per second. A parser for options."""
    if given is None:
        return None
    found = _RATE.fullmatch(given)
    per_second = float(found[1]) / _SECONDS[found[2] or "s"] if found else 0
    if not per_second:
        raise typer.BadParameter(f"{given!r} is not a rate: {HELP}.")
    return per_second


def smooth_batch(per_second: float | None, most: int) -> int:
    """Small enough that a second sees several of them."""
    return most if per_second is None else max(1, min(most, int(per_second / STEPS_PER_SECOND)))


def paced(batches: Iterator[Sized], *, total: int, per_second: float | None, stopped: Event) -> Iterator[int]:
    """Takes one batch after the other, not faster than that; yields how much was done so far. Stops between two."""
    done, started_at = 0, time.monotonic()
    while done < total and not stopped.is_set():
        batch = next(batches, None)
        if batch is None:
            return
        done += len(batch)
        yield done
        if per_second is not None and done < total:
            stopped.wait(max(0.0, started_at + done / per_second - time.monotonic()))
