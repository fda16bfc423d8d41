"""Limits are checked when a handler is declared, and a rate has a burst that its users can rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core.limits import Rate
from tasks.core.registry import BadHandler, handler, handlers
from tests.tasks.work import insert


@pytest.mark.parametrize(
    ("text", "per_second", "burst"),
    [
        ("5/s", 5, 5),
        ("100/m", 100 / 60, 500 / 60),
        ("60/m", 1, 5),
        ("1000/h", 1000 / 3600, 5000 / 3600),
        ("10/d", 10 / 86400, 1),
    ],
)
def test_the_burst_is_five_seconds_worth_at_most_the_number_and_at_least_one(
    text: str, per_second: float, burst: float
) -> None:
    rate = Rate.parse(text)
    assert rate.per_second == pytest.approx(per_second)
    assert rate.burst == pytest.approx(burst)
    assert str(rate) == text


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        *[
            ({"rate": bad}, "rate must be a number from 1 to")
            for bad in ("100", "0/s", "1/w", "-1/s", "1.5/s", "9999999/s", 5)
        ],
        *[({"max_running": bad}, "max_running must be a whole number") for bad in (0, -1, 1.5, "5", 10**7)],
        ({"limit_by": "tenant"}, "limit_by needs rate or max_running"),
        *[({"rate": "1/s", "limit_by": bad}, "limit_by must be the name of a field") for bad in ("", "x" * 101, 5)],
    ],
    ids=str,
)
def test_a_limit_that_makes_no_sense_is_refused_with_its_rule(how: dict[str, Any], rule: str) -> None:
    with pytest.raises(BadHandler, match=rule):
        handler("test.bad", **how)(insert)
    assert "test.bad" not in handlers()
