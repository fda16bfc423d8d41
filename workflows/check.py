"""Whether a workflow can be run here: its shape, and that whatever it names is there."""

from __future__ import annotations

from typing import Any

from workflows import functions, http_stage, llm_stage
from workflows.payload import HttpStage, LlmStage, PythonStage, Workflow, parsed


def check(payload: Any) -> Workflow:
    """Raises BadWorkflow, in a sentence. Nothing is asked and nothing is run."""
    workflow = parsed(payload)
    for stage in workflow.stages:
        match stage:
            case PythonStage():
                functions.check(stage)
            case HttpStage():
                http_stage.check(stage)
            case LlmStage():
                llm_stage.check(stage)
    return workflow
