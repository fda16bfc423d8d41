"""Parse and keep a rate: `50/s`, `30/m`, `1000/h`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sized
from threading import Event
from typing import Final

import typer

HELP: Final = "50/s, 30/m or 1000/h"
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)/([smh])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


def parse_rate(given: str) -> float:
    """Return the rate per second."""
    found = _RATE.fullmatch(given)
    per_second = float(found[1]) / _SECONDS[found[2]] if found else 0
    if not per_second:
        raise typer.BadParameter(f"{given!r} is not a rate. Give a number and a unit: {HELP}.")
    return per_second


def paced(batches: Iterator[Sized], *, total: int, per_second: float | None, stopped: Event) -> Iterator[int]:
    """Take the batches no faster than the rate; yield the number of items done so far. Stop when `stopped` is set."""
    done, started_at = 0, time.monotonic()
    while done < total and not stopped.is_set():
        batch = next(batches, None)
        if batch is None:
            return
        done += len(batch)
        yield done
        if per_second is not None and done < total:
            stopped.wait(max(0.0, started_at + done / per_second - time.monotonic()))
