"""How long to wait after a failure: doubling, capped, spread at random so that failures do not come back together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

_LARGEST_EXPONENT: Final = 62  # 2^62 ms is longer than any cap; a larger one would only cost time


def backoff_ms(
    attempt: int,
    *,
    base_ms: int,
    cap_ms: int,
    jitter: float = 0.0,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float:
    """The wait after failure number `attempt` (1 is the first): min(base · 2^(attempt−1), cap), ± jitter. 0 stays 0."""
    wait = min(base_ms * 2 ** min(max(attempt - 1, 0), _LARGEST_EXPONENT), cap_ms)
    return wait * (1 + uniform(-jitter, jitter)) if jitter else float(wait)
