"""The route that submits a workflow and, if asked, waits for its result."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter
from starlette.requests import Request

from api.authorization import require_scope
from api.documented import Answer, Body, documented
from api.json_responses import JsonResponse
from api.ledger_calls import call_ledger
from api.shapes import SignedReceipt, SubmittedTask, Task
from api.submission import (
    KEY_HEADER,
    SUBMITTED,
    WantedReceipt,
    read_idempotency_key,
    submit_and_commit,
    submit_for_receipt,
)
from api.tokens import Scope, Token
from api.waiting import Patience, Wait, answer_final, require_no_wait
from receipts.kinds import WORKFLOWS
from tasks.submission.envelope import Context, NewTask
from tasks.submission.json_lines import read_json, task_from_envelope
from workflows import TYPE
from workflows.payload import Workflow

router = APIRouter(prefix="/api/workflows", tags=["workflows"])
Submitter = Annotated[Token, require_scope(Scope.WORKFLOWS_SUBMIT)]
APPLIED: Final = Task | SubmittedTask | SignedReceipt
EXAMPLES: Final = {
    "two stages": {
        "workflowId": "order 17",
        "input": {"order": 17},
        "stages": [
            {"name": "fetch", "kind": "http", "destination": "crm", "body": {"order": "{input}"}},
            {"name": "shorten", "kind": "python", "function": "shorten"},
        ],
    },
    "with context, notify and priority": {
        "stages": [{"name": "shorten", "kind": "python", "function": "shorten"}],
        "input": "a long text",
        "context": {"user": "ann", "traceId": "4bf92f3577b34da6"},
        "notify": "crm",
        "priority": 7,
    },
}


class WorkflowToApply(Workflow):
    """A workflow, and beside its stages the context, destination for its result, and priority of its task."""

    context: Context = Context()
    notify: str | None = None
    priority: int | None = None


ENVELOPE_FIELDS: Final = WorkflowToApply.model_fields.keys() - Workflow.model_fields.keys()


@router.post(
    "/apply",
    **documented(
        "Run a workflow",
        body=Body(WorkflowToApply, EXAMPLES),
        headers=[KEY_HEADER],
        answers=SUBMITTED | {200: Answer("The finished task, or what was submitted before.", APPLIED)},
        errors=[409, 429],
    ),
)
async def apply(
    request: Request, token: Submitter, wait: Wait = None, receipt: WantedReceipt | None = None
) -> JsonResponse:
    """Answer with the whole task if it is final within `wait` seconds, otherwise with what was submitted."""
    raw, key = await request.body(), read_idempotency_key(request)
    if receipt is not None:
        require_no_wait(wait)
        return await submit_for_receipt(token, raw, lambda: read_workflow(raw), key, receipt, kind=WORKFLOWS)
    submitted = await call_ledger(lambda: submit_and_commit(token, read_workflow(raw), key))
    return await answer_final(request, token, submitted, Patience.of(request, wait))


def read_workflow(raw: bytes) -> NewTask:
    """Return the task of a workflow. `context`, `notify` and `priority` beside its stages are those of the task."""
    body = read_json(raw)
    if not isinstance(body, dict):
        return NewTask(TYPE, body)  # rejected as a workflow
    envelope = {name: body.pop(name) for name in ENVELOPE_FIELDS if name in body}
    return task_from_envelope(NewTask(TYPE), {**envelope, "payload": body})
