"""Fold the rows of the tally into sums for each minute, hour and day, and for all time.

A row is deleted and added in one transaction, so it is counted once. A sum for all time never falls. The sums of
minutes and hours are deleted after a while; those of days are kept.
"""

from __future__ import annotations

import time
from typing import Final

from sqlalchemy import Engine

from models.sql import sql

PAGE: Final = 10_000
MINUTES_ARE_KEPT_HOURS: Final = 48
HOURS_ARE_KEPT_DAYS: Final = 90

# fold: rows of the tally → added to their periods. Equal histograms are multiplied instead of added one by one: that of
# a single task has one of a few shapes.
FOLD: Final = sql("""
    WITH taken AS MATERIALIZED (
        DELETE FROM ledger.task_tally WHERE id IN (SELECT id FROM ledger.task_tally ORDER BY id LIMIT :page)
        RETURNING minute, subject, queue, type, result, count, run_seconds, run, wait_seconds, wait),
    alike AS MATERIALIZED (
        SELECT minute, subject, queue, type, result, run, wait, count(*) AS times, sum(count) AS count,
               sum(run_seconds) AS run_seconds, sum(wait_seconds) AS wait_seconds
        FROM taken GROUP BY minute, subject, queue, type, result, run, wait),
    folded AS MATERIALIZED (
        SELECT span, CASE span WHEN 'ever' THEN '-infinity' ELSE date_trunc(span, minute, 'UTC') END AS start, subject,
               queue, type, result, sum(count) AS count, sum(run_seconds) AS run_seconds,
               ledger.tally_histogram(run, times) AS run, sum(wait_seconds) AS wait_seconds,
               ledger.tally_histogram(wait, times) AS wait
        FROM alike CROSS JOIN unnest(ARRAY['minute', 'hour', 'day', 'ever']) AS spans(span) GROUP BY 1, 2, 3, 4, 5, 6),
    added AS (
        INSERT INTO ledger.tally_period AS period
            (span, start, subject, queue, type, result, count, run_seconds, run, wait_seconds, wait)
        SELECT * FROM folded ORDER BY span, start, subject, queue, type, result
        ON CONFLICT (span, start, subject, queue, type, result) DO UPDATE
        SET count = period.count + excluded.count, run_seconds = period.run_seconds + excluded.run_seconds,
            run = ledger.tally_add(period.run, excluded.run, 1),
            wait_seconds = period.wait_seconds + excluded.wait_seconds,
            wait = ledger.tally_add(period.wait, excluded.wait, 1))
    SELECT count(*) FROM taken
""")
# forget_periods: delete the sums of old minutes and hours.
FORGET_PERIODS: Final = sql("""
    DELETE FROM ledger.tally_period
    WHERE (span = 'minute' AND start < (SELECT ledger.ledger_now()) - make_interval(hours => :minutes_kept))
       OR (span = 'hour' AND start < (SELECT ledger.ledger_now()) - make_interval(days => :hours_kept))
""")


def fold(engine: Engine, *, budget_seconds: float) -> int:
    """Fold what is in the tally, a page in each transaction. Return how many rows were folded."""
    until = time.monotonic() + budget_seconds
    folded = 0
    while True:
        with engine.begin() as connection:
            page: int = connection.execute(FOLD, {"page": PAGE}).scalar_one()
        folded += page
        if page < PAGE or time.monotonic() > until:
            return folded


def forget_periods(engine: Engine) -> int:
    """Delete old sums; return how many."""
    kept = {"minutes_kept": MINUTES_ARE_KEPT_HOURS, "hours_kept": HOURS_ARE_KEPT_DAYS}
    with engine.begin() as connection:
        return connection.execute(FORGET_PERIODS, kept).rowcount
