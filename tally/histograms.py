"""Fixed histograms: how many values are up to each bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final

# Upper bounds in seconds; one more bucket has everything above. New bounds may only be appended.
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)


def count_values(values: Iterable[float]) -> list[int]:
    """Return the number of values in each bucket; empty buckets at the end are left out."""
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect_left(BOUNDS, value)] += 1
    while counts and not counts[-1]:
        counts.pop()
    return counts


def add(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def as_array(counts: Sequence[int]) -> str:
    """Return the text of a PostgreSQL array."""
    return "{" + ",".join(map(str, counts)) + "}"
