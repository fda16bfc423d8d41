"""How pages write numbers, durations and rates."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from console import formats
from models.status import TaskStatus
from tasks.operations.stats import StatusCount


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        *((None, "–"), (-5, "0 ms"), (0, "0 ms"), (0.0026, "3 ms"), (0.0994, "99 ms"), (0.1, "0.1 s")),
        *((9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 m"), (200, "3 m"), (3569, "59 m"), (3571, "1 h")),
        *((5 * 3600 + 12 * 60, "5 h 12 m"), (10 * 3600, "10 h"), (47.4 * 3600, "47 h"), (86400 * 4.6, "4 d")),
        (86400 * 1234, "1,234 d"),
    ],
)
def test_a_duration_is_written_as_people_say_it(seconds: float | None, written: str) -> None:
    assert formats.duration(seconds) == written
    if seconds is not None:
        assert formats.duration(timedelta(seconds=seconds)) == written


@pytest.mark.parametrize(
    ("per_second", "written"),
    [
        *((None, ""), (0, "0/s"), (0.005, "<1/min"), (0.05, "3/min"), (0.0999, "6/min"), (0.1, "0.1/s")),
        *((9.94, "9.9/s"), (9.96, "10/s"), (999.4, "999/s"), (999.6, "1.0k/s"), (22_851, "22.9k/s")),
    ],
)
def test_a_rate_is_per_second_or_per_minute(per_second: float | None, written: str) -> None:
    assert formats.rate(per_second) == written


@pytest.mark.parametrize(
    ("size", "written"),
    [
        *(
            (0, "0 bytes"),
            (1, "1 bytes"),
            (1023, "1,023 bytes"),
            (1024, "1 KiB"),
            (3500, "3.4 KiB"),
            (10_240, "10 KiB"),
        ),
        *((20_971_520, "20 MiB"), (1024**3, "1 GiB"), (1024**4, "1,024 GiB")),
    ],
)
def test_a_size_is_written_as_people_say_it(size: int, written: str) -> None:
    assert formats.size(size) == written


def test_numbers_have_separators_and_estimates_a_sign() -> None:
    assert formats.number(1234567) == "1,234,567"
    assert formats.count(StatusCount(TaskStatus.DEAD, 1234, exact=False)) == "≈ 1,234"
    assert formats.clock(datetime(2026, 11, 18, 9, 5, 7, tzinfo=UTC)) == "09:05:07 UTC"


def test_what_stands_between_backticks_is_code_and_everything_is_escaped() -> None:
    assert formats.with_code("Run `manage.py up`, then `celery <b>`.") == (
        "Run <code>manage.py up</code>, then <code>celery &lt;b&gt;</code>."
    )
    assert formats.with_code("a ` b <i>") == "a ` b &lt;i&gt;"
    assert formats.with_code("`<script>` & {{ x }}") == "<code>&lt;script&gt;</code> &amp; {{ x }}"


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def test_json_is_indented_unless_that_makes_it_many_times_as_long() -> None:
    assert formats.as_json({"a": [1, {}], "ü": None}) == '{\n  "a": [\n    1,\n    {}\n  ],\n  "ü": null\n}'
    flat, deep = [1] * 340_000, nested([1] * 340_000, 60)
    assert formats.as_json(flat).startswith("[\n  1,\n  1")
    written = formats.as_json(deep)
    assert len(written) < 1.1 * len(json.dumps(deep))
    assert json.loads(written) == deep
    assert written.count("\n") == 339_999, "each value has a line"
