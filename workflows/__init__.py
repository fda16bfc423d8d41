"""Workflows (`workflow.execute`): named stages that run one after the other, each as a durable step.

    @stage("store_summary")
    def store_summary(given): …        called by a `python` stage; name its module in INGEST_HANDLERS

A stage whose output was committed never runs again. A worker may die between the end of a stage and that commit; the
stage then runs once more with the same key (`StageInput.key`, `Idempotency-Key`), so that the receiver can recognise
the repetition. `check` rejects a workflow that cannot be run before it is stored.
"""

from workflows.check import check
from workflows.functions import stage
from workflows.payload import TYPE, BadWorkflow
from workflows.stage import StageInput

__all__ = ["TYPE", "BadWorkflow", "StageInput", "check", "stage"]
