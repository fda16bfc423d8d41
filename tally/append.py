"""Append rows to the tally, inside a statement that settles tasks or as a statement of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from models.driver_values import array
from models.sql import sql
from tally.histograms import add, as_array, count_values
from tally.subjects import Subject

_COLUMNS: Final = "(minute, subject, queue, type, result, count, run_seconds, run, wait_seconds, wait, kind)"


@dataclass(slots=True)
class Sums:
    """How often something happened, how long it took, and how long it had waited before."""

    count: int = 0
    run_seconds: float = 0.0
    run: list[int] = field(default_factory=list)
    wait_seconds: float = 0.0
    wait: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, count: int, runs: Collection[float] = (), waits: Collection[float] = ()) -> Sums:
        return cls(count, sum(runs), count_values(runs), sum(waits), count_values(waits))

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.count + other.count,
            self.run_seconds + other.run_seconds,
            add(self.run, other.run),
            self.wait_seconds + other.wait_seconds,
            add(self.wait, other.wait),
        )

    def values(self) -> dict[str, Any]:
        """Return the parameters of `insert_tally`."""
        return {
            "run_seconds": self.run_seconds,
            "run": as_array(self.run),
            "wait_seconds": self.wait_seconds,
            "wait": as_array(self.wait),
        }


def kind_of(*, subject: str = "subject", result: str = "result") -> str:
    """Return SQL for the hash of what a row counts, by which `totals.py` groups rows: texts would take twice as long.

    The statements compute it, because a generated column would double the cost of appending a row.
    """
    return (
        f"hashtextextended({result}, hashtextextended(type, hashtextextended(queue, hashtextextended({subject}, 0))))"
    )


def insert_tally(source: str, result: str, *, ids: str) -> str:
    """Return a CTE that counts the tasks of the CTE `source` with one row, if there are as many as `ids`.

    If some were not settled, `run_seconds` and the others, which are sums over all of them, would be wrong. The caller
    then appends a row for those that were.
    """
    return f"""
        tally AS (
            INSERT INTO ledger.task_tally {_COLUMNS}
            SELECT date_trunc('minute', at), '{Subject.TASK}', queue, type, '{result}', count(*),
                   CAST(:run_seconds AS float8), CAST(:run AS integer[]), CAST(:wait_seconds AS float8),
                   CAST(:wait AS integer[]), {kind_of(subject=f"'{Subject.TASK}'", result=f"'{result}'")}
            FROM {source} CROSS JOIN clock GROUP BY at, queue, type HAVING count(*) = cardinality({ids}))"""


# append: one row for each given sum.
APPEND: Final = sql(f"""
    INSERT INTO ledger.task_tally {_COLUMNS}
    SELECT date_trunc('minute', (SELECT ledger.ledger_now())), subject, queue, type, result, count, run_seconds,
           CAST(run AS integer[]), wait_seconds, CAST(wait AS integer[]), {kind_of()}
    FROM unnest(CAST(:subjects AS text[]), CAST(:queues AS text[]), CAST(:types AS text[]), CAST(:results AS text[]),
                CAST(:counts AS integer[]), CAST(:run_seconds AS float8[]), CAST(:runs AS text[]),
                CAST(:wait_seconds AS float8[]), CAST(:waits AS text[]))
         AS given(subject, queue, type, result, count, run_seconds, run, wait_seconds, wait)
""")


@dataclass(frozen=True, slots=True)
class Counted:
    """What a row of the tally counts."""

    subject: Subject
    result: str
    queue: str = ""
    type: str = ""


def append_values(sums: Mapping[Counted, Sums]) -> dict[str, str]:
    """Return the parameters of `APPEND`."""
    counted: Sequence[Counted] = list(sums)
    return {
        "subjects": array(each.subject for each in counted),
        "queues": array(each.queue for each in counted),
        "types": array(each.type for each in counted),
        "results": array(each.result for each in counted),
        "counts": array(each.count for each in sums.values()),
        "run_seconds": array(each.run_seconds for each in sums.values()),
        "runs": array(as_array(each.run) for each in sums.values()),
        "wait_seconds": array(each.wait_seconds for each in sums.values()),
        "waits": array(as_array(each.wait) for each in sums.values()),
    }
