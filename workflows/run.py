"""Run a workflow: its stages in order, each at most once per task.

The output of a stage is committed as a step under the stage's name before the next stage begins:

    {"output": …, "kind": "llm", "seconds": 1.2, "attempt": 1, …}   `attempt`: the attempt in which the stage finished

The key of a stage is `workflowId:stage`, so that a receiver can tell a repetition from a new request. The name of the
principal comes before it if the task was submitted over HTTP: the same workflowId of two principals is two workflows.
"""

from __future__ import annotations

import time
from typing import Any, Final

from outbox.canonical_json import BadPayload, canonical_json
from tasks import Permanent, Task
from workflows import functions, http_stage, llm_stage
from workflows.check import check
from workflows.payload import BadWorkflow, HttpStage, LlmStage, PythonStage, Stage, Workflow
from workflows.stage import StageInput, StageOutput

MAX_OUTPUT_BYTES: Final = 262_144  # of one stage


def run(task: Task) -> dict[str, Any]:
    """Return the output of the last stage, and kind, duration and attempt of every stage."""
    workflow = _check(task.payload)
    workflow_id = workflow.workflow_id or str(task.id)
    outputs: dict[str, Any] = {}
    finished: list[dict[str, Any]] = []
    for stage in workflow.stages:
        key = f"{_owner(task, workflow)}{workflow_id}:{stage.name}"
        given = StageInput(workflow_id, stage.name, workflow.input, dict(outputs), key, task.traceparent)
        done = dict(task.step(stage.name, _run_step, stage, given, task.attempt_count + 1))
        outputs[stage.name] = done.pop("output")
        finished.append({"name": stage.name, **done})
    return {"workflowId": workflow_id, "output": outputs[workflow.stages[-1].name], "stages": finished}


def _check(payload: Any) -> Workflow:
    try:
        return check(payload)
    except functions.UnknownFunction:  # retry: a worker with newer code may know the function
        raise
    except BadWorkflow as error:
        raise Permanent(error.message) from None


def _owner(task: Task, workflow: Workflow) -> str:
    principal = task.context.get("principal")
    return f"{principal}:" if principal and workflow.workflow_id is not None else ""


def _run_step(stage: Stage, given: StageInput, attempt: int) -> dict[str, Any]:
    """Run a stage and return what the ledger keeps of it.

    An output that cannot be stored makes the task DEAD at once, because a retry would repeat the effect.
    """
    started_at = time.monotonic()
    result = _run(stage, given)
    seconds = round(time.monotonic() - started_at, 3)
    try:
        size = len(canonical_json(result.output, what=f"output of the stage {stage.name!r}").encode())
    except BadPayload as error:
        raise Permanent(error.message) from None
    if size > MAX_OUTPUT_BYTES:
        raise Permanent(
            f"The output of the stage {stage.name!r} has {size:,} bytes; the limit is {MAX_OUTPUT_BYTES:,}."
        )
    return {"output": result.output, "kind": stage.kind, "seconds": seconds, "attempt": attempt, **result.notes}


def _run(stage: Stage, given: StageInput) -> StageOutput:
    match stage:
        case PythonStage():
            return functions.run(stage, given)
        case HttpStage():
            return http_stage.run(stage, given)
        case LlmStage():
            return llm_stage.run(stage, given)
