"""Workflows (`workflow.execute`): named stages, one after the other, each a durable step (P11).

    @stage("store_summary")
    def store_summary(given): …        what a `python` stage runs; its module is named in INGEST_HANDLERS

A stage that is done is never run again, whatever became of the worker. Between the end of a stage and the COMMIT of its
output a worker may die; the stage then runs once more, with the same key (`StageInput.key`, `Idempotency-Key`), by
which the other side knows it. `check` says in a sentence why a workflow cannot be run, before it is stored.
"""

from workflows.check import check
from workflows.functions import stage
from workflows.payload import TYPE, BadWorkflow
from workflows.stage import StageInput

__all__ = ["TYPE", "BadWorkflow", "StageInput", "check", "stage"]
