"""Run Hypothesis state machines: reproducibly, against real servers, without a time limit per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def run_machine(machine: Callable[[], Any], *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]  # Hypothesis accepts any factory
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking takes minutes; the steps are readable without it
        ),
    )
