"""Running a workflow: its stages in their order, each once in the life of the task.

The output of a stage is kept as a step under the stage's name, in one commit, before the next stage begins:

    {"output": …, "kind": "llm", "seconds": 1.2, "attempt": 1, …}   `attempt`: in which run of the task it was done

The key of what a stage does is `workflowId:stage`, so that the other side can tell a repetition from a new wish. It has
the principal's name before it where the task came over HTTP: the same workflowId of two principals is two workflows.
"""

from __future__ import annotations

import time
from typing import Any, Final

from api.principals import PRINCIPAL
from outbox.canonical import BadPayload, canonical_json
from tasks.core.outcomes import Permanent
from tasks.core.task import Task
from workflows import functions, http_stage, llm_stage
from workflows.check import check
from workflows.payload import BadWorkflow, HttpStage, LlmStage, PythonStage, Stage, Workflow
from workflows.stage import StageInput, StageOutput

OUTPUT_LIMIT: Final = 262_144  # of one stage


def run(task: Task) -> dict[str, Any]:
    """The output of the last stage, and how each of them went."""
    workflow = _checked(task.payload)
    workflow_id = workflow.workflow_id or str(task.id)
    outputs: dict[str, Any] = {}
    told: list[dict[str, Any]] = []
    for stage in workflow.stages:
        key = f"{_owner(task, workflow)}{workflow_id}:{stage.name}"
        given = StageInput(workflow_id, stage.name, workflow.input, dict(outputs), key, task.context.get("traceparent"))
        done = dict(task.step(stage.name, _done, stage, given, task.attempt_count + 1))
        outputs[stage.name] = done.pop("output")
        told.append({"name": stage.name, **done})
    return {"workflowId": workflow_id, "output": outputs[workflow.stages[-1].name], "stages": told}


def _checked(payload: Any) -> Workflow:
    try:
        return check(payload)
    except functions.UnknownFunction:  # a worker of yesterday may run it today: tried again
        raise
    except BadWorkflow as refused:
        raise Permanent(refused.message) from None


def _owner(task: Task, workflow: Workflow) -> str:
    principal = task.context.get(PRINCIPAL)
    return f"{principal}:" if principal and workflow.workflow_id is not None else ""


def _done(stage: Stage, given: StageInput, attempt: int) -> dict[str, Any]:
    """What the ledger keeps of a stage. An output that cannot be kept is the end: trying again repeats the effect."""
    started_at = time.monotonic()
    made = _run(stage, given)
    seconds = round(time.monotonic() - started_at, 3)
    try:
        size = len(canonical_json(made.output, what=f"output of the stage {stage.name!r}").encode())
    except BadPayload as refused:
        raise Permanent(refused.message) from None
    if size > OUTPUT_LIMIT:
        raise Permanent(f"The output of the stage {stage.name!r} has {size:,} bytes, and {OUTPUT_LIMIT:,} is the most.")
    return {"output": made.output, "kind": stage.kind, "seconds": seconds, "attempt": attempt, **made.notes}


def _run(stage: Stage, given: StageInput) -> StageOutput:
    match stage:
        case PythonStage():
            return functions.run(stage, given)
        case HttpStage():
            return http_stage.run(stage, given)
        case LlmStage():
            return llm_stage.run(stage, given)
