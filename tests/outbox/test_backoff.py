"""The backoff doubles up to its cap, and jitter spreads it."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.backoff import backoff_ms

default = partial(backoff_ms, base_ms=1000, cap_ms=600_000)
# The lease protocol's table starts its exponent at 1 and ours starts at 0, so its row n is our failure n + 1.
by_lease_protocol = partial(backoff_ms, base_ms=60_000, cap_ms=3_600_000)


def test_the_wait_doubles_from_the_base_to_the_cap() -> None:
    seconds = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    assert [default(attempt) for attempt in range(1, 13)] == [1000.0 * s for s in seconds]


@pytest.mark.parametrize(
    ("retry_count", "wait", "shortest", "longest"),
    [
        (1, 120, 84, 156),
        (2, 240, 168, 312),
        (3, 480, 336, 624),
        (4, 960, 672, 1248),
        (5, 1920, 1344, 2496),
        (6, 3600, 2520, 4680),
        (7, 3600, 2520, 4680),
    ],
)
def test_the_backoff_table_of_the_lease_protocol_holds(
    retry_count: int, wait: int, shortest: int, longest: int
) -> None:
    after = partial(by_lease_protocol, retry_count + 1)
    assert after() == wait * 1000
    assert after(jitter=0.3, uniform=lambda low, _high: low) == pytest.approx(shortest * 1000)
    assert after(jitter=0.3, uniform=lambda _low, high: high) == pytest.approx(longest * 1000)


def test_jitter_spreads_the_retries_of_failures_that_happened_together() -> None:
    uniform = random.Random(1).uniform
    waits = [default(4, jitter=0.3, uniform=uniform) for _ in range(1000)]
    assert all(8000 * 0.7 <= wait <= 8000 * 1.3 for wait in waits)
    assert len(set(waits)) > 990
    assert min(waits) < 8000 * 0.72
    assert max(waits) > 8000 * 1.28


def test_without_jitter_the_wait_is_not_random() -> None:
    def never(_low: float, _high: float) -> float:
        raise AssertionError

    assert default(1, uniform=never) == 1000


@pytest.mark.parametrize(("base_ms", "cap_ms"), [(0, 0), (0, 600_000), (1000, 0)])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_a_backoff_of_zero_stays_zero(base_ms: int, cap_ms: int, jitter: float) -> None:
    assert backoff_ms(5, base_ms=base_ms, cap_ms=cap_ms, jitter=jitter) == 0


@pytest.mark.timeout(5)
def test_the_millionth_failure_waits_for_the_cap_and_is_computed_quickly() -> None:
    assert default(10**6) == default(10**18) == 600_000


def test_attempt_zero_waits_like_the_first_failure() -> None:
    assert default(0) == default(-1) == default(1)


@settings(derandomize=True, database=None)
@given(
    attempt=st.integers(1, 200),
    base_ms=st.integers(0, 10**7),
    cap_ms=st.integers(0, 10**9),
    jitter=st.floats(0, 1),
)
def test_the_backoff_is_never_negative_never_above_the_cap_plus_jitter_and_never_shrinks(
    attempt: int, base_ms: int, cap_ms: int, jitter: float
) -> None:
    plain = partial(backoff_ms, base_ms=base_ms, cap_ms=cap_ms)
    assert 0 <= plain(attempt) <= plain(attempt + 1) <= cap_ms
    assert 0 <= plain(attempt, jitter=jitter) <= plain(attempt) * (1 + jitter) * 1.000001
