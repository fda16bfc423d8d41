"""workflow.execute: the stages of a workflow, one after the other (`tasks/workflows/`, docs/workflows.md).

60 s after the first failure, 300 s after the second, DEAD at the third. One task in a message, because one may take
minutes and the others need not wait for it. The limit is for one run: what is done by then is kept.
"""

from __future__ import annotations

from typing import Any

from tasks.core.registry import handler
from tasks.core.task import Task
from workflows import TYPE
from workflows.run import run


@handler(TYPE, transactional=False, batch=1, max_attempts=3, backoff=[60, 300], soft_limit_seconds=1500)
def execute_workflow(task: Task) -> dict[str, Any]:
    return run(task)
