"""Where the stations and arrows of the pipeline are drawn: side by side, or one below the other on a phone.

Both pictures have the same geometry with the axes exchanged. A position is `along` the main line from accepted to
succeeded and `across` it, where the stations beside it are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from console.pipeline import Flow, Level, Line, Station

# The place of each station: its number along the main line, and 1 if it is beside it.
PLACES: Final = {
    "accepted": (0, 0),
    "saved": (1, 0),
    "queued": (2, 0),
    "running": (3, 0),
    "succeeded": (4, 0),
    "destinations": (0, 1),
    "outbox": (1, 1),
    "retrying": (2, 1),
    "dead": (3, 1),
    "sinks": (4, 1),
}
RADIUS: Final = 10.0  # of the corners of arrows
PADDING: Final = 14.0  # between a box and its text
FIRST_LINE: Final = {False: 76.0, True: 50.0}  # of a station with a figure; of a list
LINE_HEIGHT: Final = 18.0
Point = tuple[float, float]


class Direction(StrEnum):
    """Which way the main line runs."""

    RIGHT = "right"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Measures:
    """Sizes of one picture, in units of its drawing; `name_length` is that of names in lists."""

    width: float
    height: float
    gap_x: float
    gap_y: float
    name_length: int


MEASURES: Final = {
    Direction.RIGHT: Measures(200, 122, 50, 66, 17),
    Direction.DOWN: Measures(148, 122, 48, 40, 10),
}


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line of text in a box."""

    y: float
    text: str
    whole: str
    figure: str
    level: Level


@dataclass(frozen=True, slots=True)
class DrawnStation:
    x: float
    y: float
    station: Station
    lines: list[DrawnLine]


@dataclass(frozen=True, slots=True)
class DrawnFlow:
    """An arrow: its line, its head, and where its pace is written."""

    path: str
    head: str
    label: Point
    anchor: str
    flow: Flow


@dataclass(frozen=True, slots=True)
class Drawing:
    direction: Direction
    width: float
    height: float
    box: Point
    padding: float
    stations: list[DrawnStation]
    flows: list[DrawnFlow]


@dataclass(frozen=True, slots=True)
class _Box:
    """The corners of a station: along the main line, and across it."""

    along: Point
    across: Point

    def at(self, share: float) -> float:
        """Return a position along the box."""
        return self.along[0] + share * (self.along[1] - self.along[0])

    @property
    def middle(self) -> float:
        return (self.across[0] + self.across[1]) / 2


def lay_out(stations: Iterable[Station], flows: Iterable[Flow], direction: Direction) -> Drawing:
    """Return the picture with all its positions."""
    sizes = MEASURES[direction]
    is_right = direction is Direction.RIGHT
    columns, rows = (5, 2) if is_right else (2, 5)
    boxes = {key: _box(place, sizes, is_right=is_right) for key, place in PLACES.items()}
    drawn = []
    for each in stations:
        x, y = _point((boxes[each.key].along[0], boxes[each.key].across[0]), is_right=is_right)
        drawn.append(DrawnStation(x, y, each, list(_lines(each, sizes))))
    return Drawing(
        direction,
        columns * sizes.width + (columns - 1) * sizes.gap_x,
        rows * sizes.height + (rows - 1) * sizes.gap_y,
        (sizes.width, sizes.height),
        PADDING,
        drawn,
        [_arrow(each, boxes, is_right=is_right) for each in flows],
    )


def _box(place: tuple[int, int], sizes: Measures, *, is_right: bool) -> _Box:
    length, depth = (sizes.width, sizes.height) if is_right else (sizes.height, sizes.width)
    gap_along, gap_across = (sizes.gap_x, sizes.gap_y) if is_right else (sizes.gap_y, sizes.gap_x)
    along, across = place[0] * (length + gap_along), place[1] * (depth + gap_across)
    return _Box((along, along + length), (across, across + depth))


def _lines(station: Station, sizes: Measures) -> Iterable[DrawnLine]:
    first = FIRST_LINE[not station.figure]
    for number, line in enumerate(station.lines):
        text = _shortened(line, sizes.name_length) if line.figure else line.text
        yield DrawnLine(first + number * LINE_HEIGHT, text, line.text, line.figure, line.level)


def _shortened(line: Line, most: int) -> str:
    most = most + 6 - min(6, len(line.figure))
    return line.text if len(line.text) <= most else f"{line.text[: most - 1]}…"


def _arrow(flow: Flow, boxes: dict[str, _Box], *, is_right: bool) -> DrawnFlow:
    points = [_point(each, is_right=is_right) for each in _route(flow, boxes[flow.start], boxes[flow.end])]
    is_on_main_line = PLACES[flow.start][1] == PLACES[flow.end][1] == 0
    (x1, y1), (x2, y2) = points[1:3] if len(points) > 2 else points
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    is_level = y1 == y2
    label, anchor = ((x, y - 8), "middle") if is_level else ((x + 8, y + 4), "start")
    if not is_on_main_line and not is_right and len(points) > 2:
        label = (x, points[-1][1] + (18 if points[-1][1] > y1 else -8))  # beside its turn there is no room
        anchor = "middle"
    return DrawnFlow(_path(points), _head(points), label, anchor, flow)


def _route(flow: Flow, start: _Box, end: _Box) -> list[Point]:
    """Return the corners of an arrow, as positions along and across the main line."""
    match flow.start, flow.end:
        case ("retrying", "queued"):
            return [(start.at(0.3), start.across[0]), (end.at(0.3), end.across[1])]
        case ("running", "retrying"):
            return _with_turn(start, 0.22, end, 0.7)
        case ("running", "sinks"):
            return _with_turn(start, 0.78, end, 0.5)
        case ("outbox", "destinations"):
            return [(start.along[0], start.middle), (end.along[1], end.middle)]
        case _ if start.across == end.across:
            return [(start.along[1], start.middle), (end.along[0], end.middle)]
    return [(start.at(0.5), start.across[1]), (end.at(0.5), end.across[0])]


def _with_turn(start: _Box, leaves_at: float, end: _Box, arrives_at: float) -> list[Point]:
    """Return the corners of an arrow that turns twice between two boxes."""
    begin, last, turn = start.at(leaves_at), end.at(arrives_at), (start.across[1] + end.across[0]) / 2
    return [(begin, start.across[1]), (begin, turn), (last, turn), (last, end.across[0])]


def _point(position: Point, *, is_right: bool) -> Point:
    along, across = position
    return (along, across) if is_right else (across, along)


def _path(points: Sequence[Point]) -> str:
    """Return a line with round corners, in SVG's notation."""
    parts = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        begin, end = _towards(corner, before), _towards(corner, after)
        parts.append(f"L{begin[0]:g} {begin[1]:g}Q{corner[0]:g} {corner[1]:g} {end[0]:g} {end[1]:g}")
    parts.append(f"L{points[-1][0]:g} {points[-1][1]:g}")
    return "".join(parts)


def _towards(start: Point, end: Point) -> Point:
    """Return the point that is RADIUS away from `start`. Lines are level or upright."""
    return (start[0] + _sign(end[0] - start[0]) * RADIUS, start[1] + _sign(end[1] - start[1]) * RADIUS)


def _head(points: Sequence[Point]) -> str:
    """Return the triangle at the end of a line."""
    *_, ((x1, y1), (x, y)) = pairwise(points)
    dx, dy = _sign(x - x1), _sign(y - y1)
    base_x, base_y, side_x, side_y = x - 8 * dx, y - 8 * dy, 4.5 * dy, 4.5 * dx
    return f"M{x:g} {y:g}L{base_x - side_x:g} {base_y - side_y:g}L{base_x + side_x:g} {base_y + side_y:g}Z"


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
