"""The charts of the overview, as positions in a drawing: ended tasks as stacked bars, times as lines.

Times are drawn on a logarithmic scale, because half of the tasks may wait for milliseconds while others wait for
minutes. The tally knows times as histograms, so a quantile is about right, not exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from console import formats
from console.history import RESULTS, STEPS, History, Step
from console.task_search import tasks_path
from tally.histograms import add, quantile

WIDTH: Final = 400.0
HEIGHT: Final = 150.0
LEFT: Final = 44.0  # of the plot; the numbers of the scale are beside it
TOP: Final = 10.0
BOTTOM: Final = 124.0
GAP: Final = 0.22  # of the width of a bar
DECADES: Final = (0.001, 3600.0)  # the times that can be shown, in seconds
NAMES: Final = {"succeeded": "succeeded", "retry": "retried", "discarded": "discarded", "dead": "dead"}
STATUSES: Final = {"succeeded": "succeeded", "retry": "retrying", "discarded": "discarded", "dead": "dead"}
QUANTILES: Final = {"half": 0.5, "most": 0.99}


@dataclass(frozen=True, slots=True)
class Tick:
    """A number at the scale on the left, or a time below."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a column."""

    y: float
    height: float
    kind: str


@dataclass(frozen=True, slots=True)
class Column:
    """One minute, hour or day. `title` says all of it in words."""

    x: float
    width: float
    title: str
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """A line, in pieces where there is nothing between, and its points."""

    kind: str
    pieces: list[str]
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Legend:
    kind: str
    name: str
    figure: str
    path: str = ""  # of the tasks that it counts


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    title: str
    about: str  # what its numbers are
    summary: str  # for those who cannot see it
    is_empty: bool
    scale: list[Tick]
    times: list[Tick]
    columns: list[Column]
    curves: list[Curve]
    legend: list[Legend]


def draw(history: History) -> list[Chart]:
    """Return the charts of a period."""
    return [
        draw_ended(history),
        _times(history, "wait", "Waiting", "from due to started", lambda step: step.wait),
        _times(history, "run", "Running", "time in the handler", lambda step: step.run),
    ]


def draw_ended(history: History) -> Chart:
    """Return the chart that shows how many tasks ended, by what became of them."""
    how = STEPS[history.period]
    top = _round_up(max(each.total for each in history.steps))
    totals = {result: sum(each.counts[result] for each in history.steps) for result in RESULTS}
    columns = []
    for x, width, step in _columns(history):
        bars, below = [], 0
        for result in RESULTS:
            if count := step.counts[result]:
                y = _linear(below + count, top)
                bars.append(Bar(y, max(_linear(below, top) - y, 1.0), result))
                below += count
        words = ", ".join(f"{count:,} {NAMES[result]}" for result, count in step.counts.items() if count)
        columns.append(Column(x, width, f"{_label(history, step)}: {words or 'nothing'}", tuple(bars)))
    words = ", ".join(f"{count:,} {NAMES[result]}" for result, count in totals.items() if count)
    return Chart(
        "ended",
        "Throughput",
        f"tasks per {how.span}",
        f"Tasks per {how.span} in the last {how.name}: {words or 'none'}.",
        is_empty=not sum(totals.values()),
        scale=[Tick(_linear(value, top), _short(value)) for value in (0, top / 2, top)],
        times=_time_ticks(history),
        columns=columns,
        curves=[],
        legend=[
            Legend(result, NAMES[result], f"{count:,}", tasks_path(status=STATUSES[result], since=history.period))
            for result, count in totals.items()
            if count
        ],
    )


def _times(history: History, key: str, title: str, about: str, histogram: Callable[[Step], Sequence[int]]) -> Chart:
    how = STEPS[history.period]
    whole: Sequence[int] = ()
    values: dict[str, list[float | None]] = {kind: [] for kind in QUANTILES}
    for step in history.steps:
        whole = add(whole, histogram(step))
        for kind, share in QUANTILES.items():
            values[kind].append(quantile(histogram(step), share))
    shown = [value for each in values.values() for value in each if value is not None]
    low, high = _decades(shown)
    columns, curves = [], []
    places = list(_columns(history))
    for number, (x, width, step) in enumerate(places):
        half, most = values["half"][number], values["most"][number]
        words = (
            f"half within {formats.duration(half)}, 99 % within {formats.duration(most)}"
            if half is not None
            else "no task"
        )
        columns.append(Column(x, width, f"{_label(history, step)}: {words}"))
    for kind, found in values.items():
        points = [
            (x + width / 2, _logarithmic(value, low, high)) if value is not None else None
            for (x, width, _), value in zip(places, found, strict=True)
        ]
        curves.append(Curve(kind, list(_pieces(points)), [each for each in points if each]))
    ends = {kind: formats.duration(quantile(whole, share)) for kind, share in QUANTILES.items()}
    return Chart(
        key,
        title,
        about,
        f"{title}, {about}, in the last {how.name}: half within {ends['half']}, 99 % within {ends['most']}.",
        is_empty=not shown,
        scale=[Tick(_logarithmic(value, low, high), _time(value)) for value in _powers(low, high)],
        times=_time_ticks(history),
        columns=columns,
        curves=curves,
        legend=[Legend("half", "half within", ends["half"]), Legend("most", "99 % within", ends["most"])]
        if shown
        else [],
    )


def _columns(history: History) -> Iterator[tuple[float, float, Step]]:
    """Yield where each step begins, and how wide its bar is."""
    width = (WIDTH - LEFT) / len(history.steps)
    for number, step in enumerate(history.steps):
        yield LEFT + (number + GAP / 2) * width, width * (1 - GAP), step


def _label(history: History, step: Step) -> str:
    how = STEPS[history.period]
    text = f"{step.start:{how.time_format}}{'' if how.span == 'day' else ' UTC'}"
    return f"{text}, so far" if step is history.steps[-1] else text


def _time_ticks(history: History) -> list[Tick]:
    how, width = STEPS[history.period], (WIDTH - LEFT) / len(history.steps)
    numbers = (0, len(history.steps) // 2, len(history.steps) - 1)
    return [Tick(LEFT + (n + 0.5) * width, f"{history.steps[n].start:{how.time_format}}") for n in numbers]


def _pieces(points: Sequence[tuple[float, float] | None]) -> Iterator[str]:
    """Yield a path for each run of neighbouring points."""
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) > 1:
            yield "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
        run = []


def _linear(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / top


def _logarithmic(value: float, low: float, high: float) -> float:
    share = math.log(max(value, low) / low) / math.log(high / low)
    return BOTTOM - (BOTTOM - TOP) * min(share, 1.0)


def _round_up(value: int) -> int:
    """Return the next 2, 4, 10, 20, 40 …, so that the half of it is a round number, too."""
    value = max(value, 2)
    power = int(10 ** math.floor(math.log10(value)))
    return next(factor * power for factor in (1, 2, 4, 10) if factor * power >= value)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten between which all values are, at least two decades apart."""
    if not values:
        return 0.001, 1.0
    low = 10.0 ** math.floor(math.log10(max(min(values), DECADES[0])))
    high = 10.0 ** math.ceil(math.log10(max(*values, DECADES[0])))
    return (low, max(high, low * 100))


def _powers(low: float, high: float) -> list[float]:
    count = round(math.log10(high / low))
    every = 1 if count <= 4 else 2
    return [low * 10**number for number in range(0, count + 1, every)]


def _time(power: float) -> str:
    return f"{power:g} s" if power >= 0.0999 else f"{power * 1000:g} ms"


def _short(value: float) -> str:
    if value < 1000:
        return f"{value:g}"
    return f"{value / 1000:g}k" if value < 1_000_000 else f"{value / 1_000_000:g}M"
