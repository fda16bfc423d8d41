"""Print the goals of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commands.output import print_table

if TYPE_CHECKING:
    from bench.ingest import Goal


def print_goals(goals: Sequence[Goal]) -> None:
    print_table(
        ("goal", "wanted", "reached", ""),
        [
            (
                goal.what,
                f"{'≤' if goal.at_most else '≥'} {goal.wanted:g}",
                f"{goal.reached:.2f}",
                "met" if goal.is_met else "missed",
            )
            for goal in goals
        ],
    )
