"""The pictures of the overview: positions and words for what a ledger may say."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import combinations

import pytest

from console.charts import BOTTOM, LEFT, TOP, WIDTH, draw
from console.history import STEPS, History, Period, Step
from console.pipeline import Flow, Level, Line, Station
from console.pipeline_layout import MEASURES, PLACES, Direction, lay_out
from tally.histograms import count_values

FLOWS = [
    *(Flow(*pair, pace="1.2k/s") for pair in (("accepted", "saved"), ("saved", "queued"), ("queued", "running"))),
    *(Flow("running", end) for end in ("succeeded", "retrying", "dead", "sinks")),
    *(Flow(*pair) for pair in (("retrying", "queued"), ("saved", "outbox"), ("outbox", "destinations"))),
]


def stations() -> list[Station]:
    return [Station(key, key.title(), "1", "/console") for key in PLACES]


def history(*counts: dict[str, int], period: Period = Period.MINUTES, **histograms: list[int]) -> History:
    """Return a history whose last steps have these counts, and these histograms."""
    how = STEPS[period]
    first = datetime(2026, 11, 18, tzinfo=UTC)
    steps = [Step(first + number * how.length) for number in range(how.count)]
    for step, found in zip(reversed(steps), reversed(counts), strict=False):
        step.counts |= found
        step.run, step.wait = histograms.get("run", []), histograms.get("wait", [])
    return History(period, steps)


@pytest.mark.parametrize("direction", Direction)
def test_stations_do_not_overlap_and_arrows_end_at_their_borders(direction: Direction) -> None:
    drawing = lay_out(stations(), FLOWS, direction)
    width, height = drawing.box
    places = {each.station.key: (each.x, each.y) for each in drawing.stations}
    for (x1, y1), (x2, y2) in combinations(places.values(), 2):
        assert abs(x1 - x2) >= width or abs(y1 - y2) >= height
    assert all(0 <= x <= drawing.width - width and 0 <= y <= drawing.height - height for x, y in places.values())
    for each in drawing.flows:
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", each.path)]
        for name, (x, y) in ((each.flow.start, numbers[:2]), (each.flow.end, numbers[-2:])):
            left, top = places[name]
            is_on_side = x in (left, left + width) and top <= y <= top + height
            assert is_on_side or (y in (top, top + height) and left <= x <= left + width), (direction, each.flow)


def test_the_two_directions_are_the_same_picture_with_its_axes_exchanged() -> None:
    drawings = [lay_out(stations(), FLOWS, direction) for direction in Direction]
    columns, rows = (len({each.x for each in drawing.stations}) for drawing in drawings)
    assert (columns, rows) == (5, 2)
    assert len({each.y for each in drawings[0].stations}) == 2
    assert len({each.y for each in drawings[1].stations}) == 5


def test_a_long_name_is_cut_and_kept_whole_for_its_tooltip() -> None:
    lines = (Line("a" * 50, "3"), Line("b" * 50, "7 dead", Level.BAD))
    listed = Station("destinations", "Destinations", "", "/console/outbox", lines)
    for direction, sizes in MEASURES.items():
        (drawn,) = lay_out([listed], [], direction).stations
        for line in drawn.lines:
            assert line.text.endswith("…")
            assert len(line.text) <= sizes.name_length + 6
            assert len(line.whole) == 50


def test_the_bars_of_a_column_stand_on_each_other_and_fit_the_scale() -> None:
    chart = draw(history({"succeeded": 90, "retry": 5, "dead": 1}, {"succeeded": 170}))[0]
    assert [tick.text for tick in chart.scale] == ["0", "100", "200"]
    assert (chart.scale[0].at, chart.scale[-1].at) == (BOTTOM, TOP)
    column = chart.columns[-2]
    assert [bar.kind for bar in column.bars] == ["succeeded", "retry", "dead"]
    below = BOTTOM
    for bar in column.bars:
        assert bar.y + bar.height == pytest.approx(below, abs=1)
        below = bar.y
    assert column.bars[-1].height >= 1, "one dead task among many is still seen"
    assert column.title == "00:13 UTC: 90 succeeded, 5 retried, 1 dead"
    assert chart.columns[-1].title == "00:14 UTC, so far: 170 succeeded"
    assert next((each.name, each.figure) for each in chart.legend) == ("succeeded", "260")
    assert LEFT <= chart.columns[0].x < chart.columns[-1].x + chart.columns[-1].width <= WIDTH


def test_times_are_lines_on_a_scale_of_powers_of_ten() -> None:
    waits = count_values([0.003] * 98 + [45.0] * 2)
    _, wait, run = draw(history({"succeeded": 100}, {"succeeded": 100}, wait=waits))
    assert [tick.text for tick in wait.scale] == ["1 ms", "0.1 s", "10 s"]
    half, most = wait.curves
    assert len(half.points) == len(most.points) == 2
    assert half.points[0][1] > most.points[0][1], "longer is higher"
    assert all(TOP <= y <= BOTTOM for curve in wait.curves for _, y in curve.points)
    assert [each.figure for each in wait.legend] == ["4 ms", "45 s"]
    assert (run.is_empty, run.legend) == (True, [])


def test_a_gap_in_the_history_is_a_gap_in_the_line() -> None:
    found = history()
    for number in (2, 3, 7):
        found.steps[number].wait = count_values([0.01])
    curve = draw(found)[1].curves[0]
    assert len(curve.points) == 3
    assert len(curve.pieces) == 1, "a point between gaps has no line"


@pytest.mark.parametrize("period", Period)
def test_a_period_without_tasks_has_no_charts_but_words(period: Period) -> None:
    for chart in draw(history(period=period)):
        assert chart.is_empty
        assert "–" in chart.summary or "none" in chart.summary


@pytest.mark.parametrize(
    ("count", "top"), [(1, "2"), (3, "4"), (11, "20"), (41, "100"), (999, "1k"), (2_500_000, "4M")]
)
def test_the_top_of_the_scale_is_a_round_number(count: int, top: str) -> None:
    chart = draw(history({"succeeded": count}))[0]
    assert chart.scale[-1].text == top
