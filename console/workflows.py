"""Workflows: the latest ones, and the stages of one as a picture with their outputs; apply a workflow.

A reader sees what the API shows: payload, result, a neutral sentence for an error. The outputs of single stages are in
no answer of the API, so they are for tokens with `operate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.principals import read_visible_task
from api.submission import submit_and_commit
from api.tasks import parse_task_id
from api.tokens import Scope
from api.visible_errors import show_task
from api.workflows import read_workflow
from console.answers import go_to
from console.door import PREFIX
from console.pages import render
from console.visitors import READERS, Visitor, require_form, require_visitor
from console.workflow_picture import LEVELS, WorkflowDrawing, draw
from models.clock import now
from models.engine import engine
from models.errors import CeleriacError, Unreachable
from tasks.operations.listing import FINAL
from tasks.operations.task_details import StoredTask
from workflows import TYPE, BadWorkflow
from workflows.payload import parse
from workflows.progress import ListedWorkflow, StageProgress, latest, progress, read_done

PAGE: Final = f"{PREFIX}/workflows"
SHOWN: Final = 50
MOST_SQUARES: Final = 20  # stages of a workflow in the list


@dataclass(frozen=True, slots=True)
class WorkflowView:
    """What is shown of one workflow."""

    task: StoredTask
    name: str
    now: datetime
    stages: list[StageProgress]
    drawings: list[WorkflowDrawing]
    complaint: str  # if the payload is not a workflow


async def show(request: Request) -> Response:
    return await _list(request, await require_visitor(request, *READERS))


async def apply(request: Request) -> Response:
    """Submit the workflow of a form, and go to its page. If it is refused, its text stays in the form."""
    visitor, form = await require_form(request, Scope.WORKFLOWS_SUBMIT)
    text = str(form.get("workflow", ""))
    try:
        submitted = await call_ledger(lambda: submit_and_commit(visitor.token, read_workflow(text.encode()), None))
    except Unreachable:
        raise
    except CeleriacError as refused:
        return await _list(request, visitor, text=text, complaint=refused.message)
    return go_to(request, f"{PAGE}/{submitted.task_id}", say="The workflow was submitted.")


async def show_workflow(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    task_id = parse_task_id(request.path_params["id"])
    whole = request.query_params.get("whole", "")[:100]

    def read() -> StoredTask | WorkflowView:
        with engine().connect() as connection:
            task = read_visible_task(connection, visitor.token, task_id)
            return _view(connection, task, whole) if task.type == TYPE else task

    found = await call_ledger(read)
    if isinstance(found, StoredTask):
        return RedirectResponse(f"{PREFIX}/tasks/{found.task_id}", status_code=303)
    values = {
        "page": "workflows",
        "view": found,
        "shown": show_task(found.task, visitor.token),
        "sees_outputs": visitor.can_operate,
        "is_final": found.task.status in FINAL,
        "whole": whole,
        "levels": LEVELS,
    }
    return render(request, "workflows_workflow.html", values)


async def _list(request: Request, visitor: Visitor, *, text: str = "", complaint: str = "") -> Response:
    def read() -> tuple[datetime, list[ListedWorkflow]]:
        with engine().connect() as connection:
            return now(connection), latest(connection, limit=SHOWN)

    at, found = await call_ledger(read)
    values: dict[str, Any] = {
        "page": "workflows",
        "now": at,
        "workflows": found,
        "can_apply": visitor.token.has_scope(Scope.WORKFLOWS_SUBMIT),
        "text": text,
        "complaint": complaint,
        "shown": SHOWN,
        "squares": MOST_SQUARES,
        "levels": LEVELS,
        "is_moving": any(each.status not in FINAL for each in found),
    }
    return render(request, "workflows.html", values, status=400 if complaint else 200)


def _view(connection: Connection, task: StoredTask, whole: str) -> WorkflowView:
    at = now(connection)
    given = task.payload.get("workflowId") if isinstance(task.payload, dict) else None
    name = given if isinstance(given, str) else ""
    try:
        workflow = parse(task.payload)
    except BadWorkflow as bad:
        return WorkflowView(task, name, at, [], [], bad.message)
    stages = progress(workflow, task.status, read_done(connection, task.task_id, whole=whole))
    return WorkflowView(task, name, at, stages, draw(stages, since=task.updated_at, now=at), "")


ROUTES: Final = [
    Route(PAGE, show, methods=["GET"]),
    Route(PAGE, apply, methods=["POST"]),
    Route(f"{PAGE}/{{id}}", show_workflow, methods=["GET"]),
]
