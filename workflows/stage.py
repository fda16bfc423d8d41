"""The input and the output of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage receives: the input of its workflow, the outputs of earlier stages, and its key."""

    workflow_id: str
    name: str
    input: Any
    outputs: Mapping[str, Any]  # of earlier stages, by name
    key: str  # the same in every run of this stage: pass it to the system that performs the effect
    traceparent: object = None

    @property
    def known(self) -> dict[str, Any]:
        """The values that a template may name."""
        return {"input": self.input, **self.outputs}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage, and notes for the result of the workflow."""

    output: Any
    notes: Mapping[str, Any] = field(default_factory=dict)
