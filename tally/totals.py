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
# those of a busy minute would take longer than everything else in a scrape. So they are behind by one tick. Rows that
# were not folded are grouped by `kind`, and one row of each names it: grouping by the names takes twice as long.
TOTALS: Final = sql("""
    WITH unfolded AS MATERIALIZED (SELECT min(id) AS id, sum(count) AS count FROM ledger.task_tally GROUP BY kind)
    SELECT subject, queue, type, result, CAST(sum(count) AS bigint), sum(run_seconds), max(run), sum(wait_seconds),
           max(wait)
    FROM (SELECT subject, queue, type, result, count, run_seconds, run, wait_seconds, wait
          FROM ledger.tally_period WHERE span = 'ever'
          UNION ALL
          SELECT subject, queue, type, result, unfolded.count, 0, NULL, 0, NULL
          FROM unfolded JOIN ledger.task_tally USING (id)) AS both_
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
# summed_history: the same for all queues and types together.
SUMMED_HISTORY: Final = sql("""
    SELECT start, result, CAST(sum(count) AS bigint), ledger.tally_histogram(run, 1), ledger.tally_histogram(wait, 1)
    FROM ledger.tally_period WHERE span = :span AND subject = :subject AND start >= :since
    GROUP BY start, result ORDER BY start, result
""")
HAS_COUNTED: Final = sql("""
    SELECT EXISTS (SELECT FROM ledger.tally_period WHERE span = 'ever' AND subject = 'task')
           OR EXISTS (SELECT FROM ledger.task_tally WHERE subject = 'task')
""")
# pace: how much was counted in the last 60 seconds. Rows know their minute only, so the minute before the current one
# counts for the part of it that is less than 60 seconds ago.
PACE: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT at, date_trunc('minute', at) AS minute FROM ledger.ledger_now() AS at)
    SELECT subject, queue, result, CAST(sum(
        count * CASE WHEN counted.minute >= clock.minute THEN 1
                     ELSE 1 - extract(epoch FROM at - clock.minute) / 60 END) / 60 AS float8)
    FROM (SELECT start AS minute, subject, queue, result, count FROM ledger.tally_period
          WHERE span = 'minute' AND start >= (SELECT minute FROM clock) - interval '1 minute'
          UNION ALL
          SELECT minute, subject, queue, result, count FROM ledger.task_tally
          WHERE minute >= (SELECT minute FROM clock) - interval '1 minute') AS counted CROSS JOIN clock
    GROUP BY subject, queue, result ORDER BY subject, queue, result
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


@dataclass(frozen=True, slots=True)
class Summed:
    """What was counted of one result in one minute, hour or day."""

    start: datetime
    result: str
    count: int
    run: Sequence[int]
    wait: Sequence[int]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often something happened in the last 60 seconds. `queue` is the destination of published events."""

    subject: Subject
    queue: str
    result: str
    per_second: float


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


def read_summed_history(
    connection: Connection, span: Span, since: datetime, *, subject: Subject = Subject.TASK
) -> list[Summed]:
    """Return what was counted since a time, for all queues and types together. What was not folded yet is not in it."""
    values = {"span": span, "since": since, "subject": subject}
    return [Summed(*row) for row in connection.execute(SUMMED_HISTORY, values)]


def read_pace(connection: Connection) -> list[Pace]:
    """Return what was counted in the last 60 seconds, whether it was folded or not."""
    return [Pace(Subject(subject), *rest) for subject, *rest in connection.execute(PACE)]


def has_counted_tasks(connection: Connection) -> bool:
    """Return whether a task was ever delivered."""
    return bool(connection.execute(HAS_COUNTED).scalar())
