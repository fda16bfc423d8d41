"""The picture of a workflow: its stages as boxes in the order in which they run, with an arrow to the next one.

On a wide screen a row of boxes runs to the right and the next one back to the left, so that every arrow is short and
straight. On a phone the boxes are one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from console import formats
from console.pipeline_layout import Direction
from workflows.progress import StageProgress, StageState

WIDTH: Final = 270.0  # of a box
HEIGHT: Final = 108.0
GAP: Final = 46.0
COLUMNS: Final = {Direction.RIGHT: 4, Direction.DOWN: 1}
LONGEST: Final = 26  # characters in a box
# How each state is coloured, with the classes of the pipeline.
LEVELS: Final = {
    StageState.DONE: "good",
    StageState.RUNNING: "active",
    StageState.NEXT: "next",
    StageState.FAILED: "bad",
    StageState.RETRYING: "warn",
    StageState.WAITING: "off",
    StageState.ENDED: "off",
}


@dataclass(frozen=True, slots=True)
class DrawnStage:
    """A box, and the lines of text in it."""

    x: float
    y: float
    number: int
    name: str
    target: str
    words: str
    level: str
    progress: StageProgress


@dataclass(frozen=True, slots=True)
class DrawnArrow:
    line: str
    head: str
    is_done: bool  # the stage before is done


@dataclass(frozen=True, slots=True)
class WorkflowDrawing:
    direction: Direction
    width: float
    height: float
    box: tuple[float, float]
    stages: list[DrawnStage]
    arrows: list[DrawnArrow]


def draw(stages: Sequence[StageProgress], *, since: datetime, now: datetime) -> list[WorkflowDrawing]:
    """Return the pictures for a wide screen and for a phone. The stage that runs has run since then."""
    words = [words_of(each, now - max([since, *_ends(stages)])) for each in stages]
    return [_lay_out(stages, words, direction) for direction in Direction]


def words_of(each: StageProgress, running: timedelta) -> str:
    """Return how far a stage is, in words."""
    match each.state:
        case StageState.DONE if each.done:
            took = "" if each.done.seconds is None else f" in {formats.duration(each.done.seconds)}"
            return f"done{took}{f', attempt {each.done.attempt}' if each.done.attempt > 1 else ''}"
        case StageState.RUNNING:
            return f"running for {formats.duration(running)}"
    return str(each.state)


def _ends(stages: Sequence[StageProgress]) -> list[datetime]:
    return [each.done.finished_at for each in stages if each.done]


def _lay_out(stages: Sequence[StageProgress], words: Sequence[str], direction: Direction) -> WorkflowDrawing:
    columns = COLUMNS[direction]
    drawn = []
    for place, (each, text) in enumerate(zip(stages, words, strict=True)):
        x, y = _corner(place, columns)
        target = f"{each.stage.kind} · {each.target}"
        drawn.append(
            DrawnStage(x, y, place + 1, _shortened(each.name), _shortened(target), text, LEVELS[each.state], each)
        )
    rows = -(-len(stages) // columns)
    return WorkflowDrawing(
        direction,
        columns * (WIDTH + GAP) - GAP,
        rows * (HEIGHT + GAP) - GAP,
        (WIDTH, HEIGHT),
        drawn,
        [_arrow(start, end) for start, end in pairwise(drawn)],
    )


def _corner(place: int, columns: int) -> tuple[float, float]:
    """Return where a box begins. Every second row runs to the left."""
    row, column = divmod(place, columns)
    return (columns - 1 - column if row % 2 else column) * (WIDTH + GAP), row * (HEIGHT + GAP)


def _arrow(start: DrawnStage, end: DrawnStage) -> DrawnArrow:
    dx, dy = (end.x > start.x) - (end.x < start.x), (end.y > start.y) - (end.y < start.y)
    x, y = start.x + WIDTH / 2 + dx * WIDTH / 2, start.y + HEIGHT / 2 + dy * HEIGHT / 2
    tip_x, tip_y = x + dx * GAP, y + dy * GAP
    base_x, base_y, side_x, side_y = tip_x - 8 * dx, tip_y - 8 * dy, 4.5 * dy, 4.5 * dx
    head = f"M{tip_x:g} {tip_y:g}L{base_x - side_x:g} {base_y - side_y:g}L{base_x + side_x:g} {base_y + side_y:g}Z"
    is_done = start.progress.state is StageState.DONE
    return DrawnArrow(f"M{x:g} {y:g}L{tip_x:g} {tip_y:g}", head, is_done)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
