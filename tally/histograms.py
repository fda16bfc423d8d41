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
    places = [bisect_left(BOUNDS, value) for value in values]
    counts = [0] * (max(places, default=-1) + 1)
    for place in places:
        counts[place] += 1
    return counts


def add(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def as_array(counts: Sequence[int]) -> str:
    """Return the text of a PostgreSQL array."""
    return "{" + ",".join(map(str, counts)) + "}"


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return about the value below which this share of the values is; None if there are no values.

    The values of a bucket are taken as evenly spread. All that is above the last bound counts as the last bound.
    """
    total, below = sum(counts), 0.0
    if not total:
        return None
    for bound, lower, count in zip((*BOUNDS, BOUNDS[-1]), (0.0, *BOUNDS), counts, strict=False):
        if count and below + count >= share * total:
            return lower + (bound - lower) * (share * total - below) / count
        below += count
    return BOUNDS[-1]
