"""Observing many values at once counts the same as observing them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from metrics import observe_many

VALUES = [0.0, 0.001, 0.005, 0.005001, 0.3, 9.999, 10.0, 11.0, 1e9, -1.0]


def count(name: str, observe: Callable[[Histogram, Iterable[float]], Any]) -> list[tuple[str, str, float]]:
    histogram = Histogram(name, "for this test", buckets=(0.005, 0.3, 10), registry=CollectorRegistry())
    observe(histogram, VALUES)
    observe(histogram, [])
    (family,) = histogram.collect()
    samples = [(sample.name.removeprefix(name), sample.labels.get("le", ""), sample.value) for sample in family.samples]
    return [sample for sample in samples if not sample[0].endswith("_created")]


def test_observing_many_values_at_once_equals_observing_each() -> None:
    one_by_one = count("one_by_one", lambda histogram, values: list(map(histogram.observe, values)))
    assert count("at_once", observe_many) == one_by_one
    assert ("_bucket", "+Inf", 10.0) in one_by_one
