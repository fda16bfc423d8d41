"""Backoff: the wait after a failure doubles up to a cap. Jitter spreads retries of failures that came together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

_LARGEST_EXPONENT: Final = 62  # 2^62 ms is longer than any cap; a larger power would only cost time


def backoff_ms(
    attempt: int,
    *,
    base_ms: int,
    cap_ms: int,
    jitter: float = 0.0,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float:
    """Return the wait after failure number `attempt`, counted from 1: min(base · 2^(attempt−1), cap) ± jitter."""
    wait = min(base_ms * 2 ** min(max(attempt - 1, 0), _LARGEST_EXPONENT), cap_ms)
    return wait * (1 + uniform(-jitter, jitter)) if jitter else float(wait)
