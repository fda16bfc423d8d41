"""Our text is the one that prometheus_client would write."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tasks.operations.metrics_text import Histograms, write_metrics

VALUES = [0, 1, 17, 0.25, 1e-9, 999_999, 1_000_000, 123_456_789, 2**53, 1.5e15, -3, float("inf"), float("nan")]
LABELS = ["", "plain", 'quote " and \\ backslash', "two\nlines", "größer"]


class _Collected:
    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def test_metrics_are_written_as_prometheus_client_writes_them() -> None:
    counter = CounterMetricFamily("a_counter", "Counts \\ of\nthings", labels=["z", "a"])
    gauge = GaugeMetricFamily("a_gauge", "Has no labels")
    empty = GaugeMetricFamily("an_empty_gauge", "Has no samples", labels=["queue"])
    histogram = HistogramMetricFamily("seconds", "Times", labels=["type", "a"])
    ours = Histograms("seconds", "Times", ["type", "a"])
    bare, our_bare = HistogramMetricFamily("delay", "One"), Histograms("delay", "One", [])
    for number, value in enumerate(VALUES):
        label = LABELS[number % len(LABELS)]
        counter.add_metric([label, str(number)], value)
        gauge.add_metric([], value)
        for each in (histogram, ours):
            each.add_metric([label, str(number)], [("0.5", number), ("+Inf", 10**number)], value)
    for one in (bare, our_bare):
        one.add_metric([], [("0.5", 3), ("+Inf", 4)], 1.5)
    families = [counter, gauge, empty, histogram, bare]
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    assert write_metrics(families) == generate_latest(registry)
    assert write_metrics([counter, gauge, empty, ours, our_bare]) == generate_latest(registry)
