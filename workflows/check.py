"""Check whether a workflow can be run here: its structure, and that everything it names exists."""

from __future__ import annotations

from typing import Any

from workflows import functions, http_stage, llm_stage
from workflows.payload import HttpStage, LlmStage, PythonStage, Workflow, parse


def check(payload: Any) -> Workflow:
    """Return the workflow, or raise BadWorkflow. No request is sent and no stage is run."""
    workflow = parse(payload)
    for stage in workflow.stages:
        match stage:
            case PythonStage():
                functions.check(stage)
            case HttpStage():
                http_stage.check(stage)
            case LlmStage():
                llm_stage.check(stage)
    return workflow
