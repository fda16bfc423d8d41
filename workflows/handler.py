"""workflow.execute: run the stages of a workflow one after the other. See docs/workflows.md.

A failed task waits 60 s, then 300 s, and is DEAD at its third failure. A message carries one task (batch=1), because a
workflow may take minutes. The time limit is per attempt: finished stages are kept.
"""

from __future__ import annotations

from typing import Any

from tasks import Task, handler
from workflows import TYPE
from workflows.run import run


@handler(TYPE, transactional=False, batch=1, max_attempts=3, backoff=[60, 300], soft_limit_seconds=1500)
def execute_workflow(task: Task) -> dict[str, Any]:
    return run(task)
