"""What a stage is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage may know: the input of its workflow, the outputs before it, and the key of what it does."""

    workflow_id: str
    name: str
    input: Any
    outputs: Mapping[str, Any]  # of the stages before it, by their names
    key: str  # the same however often this stage runs: give it to whoever has the effect
    traceparent: object = None

    @property
    def known(self) -> dict[str, Any]:
        """What a template may name."""
        return {"input": self.input, **self.outputs}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What came out, and what else is worth keeping."""

    output: Any
    notes: Mapping[str, Any] = field(default_factory=dict)
