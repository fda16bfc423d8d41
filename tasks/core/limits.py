"""Limits of a handler over all workers: how many of its tasks run at once, and how many start per second, minute, …

@handler("crm.sync", transactional=False, rate="100/m", max_running=5, limit_by="tenant")

A limit holds for the whole type, or for each value of the field `limit_by`, which is looked up in the context of the
task and then in its payload; tasks without it share one limit. `limit_key` in the ledger is that value.

A rate is a bucket of tokens: a task that starts takes one, and the bucket is refilled steadily up to the burst. So in
any window of `t` seconds, at most `t` seconds' worth of tasks plus one burst start. The burst is what the rate allows
in BURST_SECONDS, but never more than the number in the rate itself, and at least one task.

`tasks/execution/limits.py` admits tasks under these limits; docs/protocol.md, Limits, has the rules and their reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from models.driver_values import array

BURST_SECONDS: Final = 5.0
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LARGEST: Final = 1_000_000
LONGEST_FIELD: Final = 100
_RATE: Final = re.compile(r"([0-9]{1,7})/([smhd])")
_LONGEST_KEY: Final = 200


@dataclass(frozen=True, slots=True)
class Rate:
    """How many tasks may start in a second, a minute, an hour or a day."""

    count: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Return the rate of a text such as "100/m". Raises ValueError."""
        found = _RATE.fullmatch(text) if isinstance(text, str) else None
        if found is None or not 1 <= int(found[1]) <= LARGEST:
            raise ValueError(f'a number from 1 to {LARGEST:,}, "/" and one of s, m, h, d, such as "100/m"')
        return cls(int(found[1]), found[2])

    def __str__(self) -> str:
        return f"{self.count}/{self.unit}"

    @property
    def per_second(self) -> float:
        return self.count / UNITS[self.unit]

    @property
    def burst(self) -> float:
        return max(1.0, min(float(self.count), BURST_SECONDS * self.per_second))


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one type."""

    type: str
    max_running: int | None = None
    rate: Rate | None = None
    limit_by: str | None = None


def limit_values(limits: Iterable[Limits]) -> dict[str, Any]:
    """Return the parameters of LIMITS."""
    known = list(limits)
    return {
        "limit_types": array(each.type for each in known),
        "max_running": array(each.max_running for each in known),
        "rates": array(each.rate and each.rate.per_second for each in known),
        "bursts": array(each.rate.burst if each.rate else 0.0 for each in known),
        "limit_by": array(each.limit_by for each in known),
    }


# A CTE with the limits that the caller knows.
LIMITS: Final = """limits AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:limit_types AS text[]), CAST(:max_running AS integer[]), CAST(:rates AS float8[]),
                             CAST(:bursts AS float8[]), CAST(:limit_by AS text[]))
                      AS limits(type, max_running, rate, burst, limit_by))"""


def limit_key_of(field: str) -> str:
    """Return the SQL expression of a task's limit key; `field` is an expression. A long value is replaced by a hash.

    PostgreSQL cannot index long texts, and a tenant must not be able to stop the claim with one.
    """
    value = f"coalesce(context ->> {field}, payload ->> {field}, '')"
    short = f"left({value}, {_LONGEST_KEY - 33}) || '#' || md5({value})"
    return f"CASE WHEN length({value}) <= {_LONGEST_KEY} THEN {value} ELSE {short} END"
