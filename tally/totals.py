"""Read the tally: exact totals of the installation, and its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from sqlalchemy import Connection

from models.sql import sql
from tally.subjects import Subject

Span = Literal["minute", "hour", "day"]

# totals: what was folded and what was not, in one snapshot. Histograms are those of the folded rows alone: adding up
# those of a busy minute would take longer than everything else in a scrape. So they are behind by one tick.
TOTALS: Final = sql("""
    SELECT subject, queue, type, result, CAST(sum(count) AS bigint), sum(run_seconds), max(run), sum(wait_seconds),
           max(wait)
    FROM (SELECT subject, queue, type, result, count, run_seconds, run, wait_seconds, wait
          FROM ledger.tally_period WHERE span = 'ever'
          UNION ALL
          SELECT subject, queue, type, result, sum(count), 0, NULL, 0, NULL
          FROM ledger.task_tally GROUP BY subject, queue, type, result) AS both_
    GROUP BY subject, queue, type, result ORDER BY subject, queue, type, result
""")
# history: the sums of each period since a time.
HISTORY: Final = sql("""
    SELECT start, queue, type, result, count, run_seconds, run, wait_seconds, wait
    FROM ledger.tally_period
    WHERE span = :span AND subject = :subject AND start >= :since
      AND (CAST(:queue AS text) IS NULL OR queue = :queue) AND (CAST(:type AS text) IS NULL OR type = :type)
    ORDER BY start, queue, type, result
""")


@dataclass(frozen=True, slots=True)
class Total:
    """All that was counted of one kind. Seconds and histograms are those of folded rows."""

    subject: Subject
    queue: str
    type: str
    result: str
    count: int
    run_seconds: float
    run: Sequence[int]
    wait_seconds: float
    wait: Sequence[int]


@dataclass(frozen=True, slots=True)
class Period:
    """What was counted in one minute, hour or day."""

    start: datetime
    queue: str
    type: str
    result: str
    count: int
    run_seconds: float
    run: Sequence[int]
    wait_seconds: float
    wait: Sequence[int]


def read_totals(connection: Connection) -> list[Total]:
    """Return the totals since the installation exists."""
    return [
        Total(Subject(subject), queue, type_, result, count, run_seconds, run or (), wait_seconds, wait or ())
        for subject, queue, type_, result, count, run_seconds, run, wait_seconds, wait in connection.execute(TOTALS)
    ]


def read_history(
    connection: Connection,
    span: Span,
    since: datetime,
    *,
    subject: Subject = Subject.TASK,
    queue: str | None = None,
    type: str | None = None,
) -> list[Period]:
    """Return what was counted since a time, oldest first. What was not folded yet is not in it."""
    values = {"span": span, "since": since, "subject": subject, "queue": queue, "type": type}
    return [Period(*row) for row in connection.execute(HISTORY, values)]
