"""What an operator does with one task: run it now, requeue it, discard it, submit it again with an edited payload.

A task that is submitted again is a new task of the same type, queue and priority. Its idempotency key is the id of the
form, so a form that is sent twice, by a double click or after a lost answer, is one task. It keeps the partition key,
so that it takes its turn among the tasks of that key, and its context names the task that it comes from. The visitor's
token needs what `POST /api/tasks` needs for the type, and is the new task's principal.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.principals import PRINCIPAL, limit_lock_time, owned_task
from api.tasks import parse_task_id
from api.tokens import Forbidden, Scope, Token
from console.answers import changed, go_to
from console.door import PREFIX
from console.formats import as_json
from console.pages import render
from console.visitors import require_form, require_visitor
from models.engine import engine, sessions
from models.errors import CeleriacError, Misuse, Unreachable
from tasks.operations import discard, retry_now
from tasks.operations.task_details import StoredTask, read_task
from tasks.submission.envelope import NewTask
from tasks.submission.submit import submit_many
from tracing import TRACEPARENT

ACTS: Final = Scope.OPERATE
ORIGIN: Final = "origin"  # in the context: the task of which this one is an edited copy
LONGEST_EDITED: Final = 60_000  # bytes of a payload; a form has 64 KiB
LONGEST_REASON: Final = 500
OWN: Final = (PRINCIPAL, TRACEPARENT, ORIGIN)  # names in the context that belong to one task only
NOT_FINITE: Final = "NaN and Infinity are not JSON"


@dataclass(frozen=True, slots=True)
class Edited:
    """A payload as an operator has typed it, the id of the form, and what is wrong with the payload."""

    text: str
    id: uuid.UUID
    error: str = ""
    remedy: str = ""


async def run_now(request: Request) -> Response:
    """RETRYING, or QUEUED for later → due now."""
    visitor, form = await require_form(request, ACTS)
    task_id = parse_task_id(request.path_params["id"])

    def change() -> str:
        was = retry_now.retry_now(engine(), task_id, actor=visitor.actor, reason=_reason(form))
        return f"The task is due now; it was {was}."

    return await changed(request, change, back=path_of(task_id))


async def requeue(request: Request) -> Response:
    """DEAD → QUEUED."""
    visitor, form = await require_form(request, ACTS)
    task_id = parse_task_id(request.path_params["id"])
    resets, accepts = "reset_steps" in form, "accept_duplicates" in form

    def change() -> str:
        retry_now.requeue(
            engine(),
            task_id,
            actor=visitor.actor,
            reason=_reason(form),
            accept_duplicates=accepts,
            reset_steps=resets,
        )
        return f"The task is queued again, and its attempts start again{'; its steps are forgotten' * resets}."

    return await changed(request, change, back=path_of(task_id))


async def give_up(request: Request) -> Response:
    """Any status but SUCCEEDED and DISCARDED → DISCARDED. A handler that runs is interrupted."""
    visitor, form = await require_form(request, ACTS)
    task_id = parse_task_id(request.path_params["id"])

    def change() -> str:
        was = discard.discard(engine(), task_id, actor=visitor.actor, reason=_reason(form))
        return f"The task is discarded; it was {was}."

    return await changed(request, change, back=path_of(task_id))


async def edit(request: Request) -> Response:
    """Show the payload in a form."""
    visitor = await require_visitor(request, ACTS)
    task = await call_ledger(_reading(request))
    require_submitter(visitor.token, task.type)
    if not can_edit(task.payload):
        raise Misuse(f"The payload is too large for a form, which has room for {LONGEST_EDITED:,} bytes.")
    return _form(request, task, Edited(as_json(task.payload), uuid.uuid4()))


async def submit_again(request: Request) -> Response:
    """Submit a new task with the payload of the form. If that is refused, show the form with the same text."""
    visitor, form = await require_form(request, ACTS)
    task = await call_ledger(_reading(request))
    require_submitter(visitor.token, task.type)
    text, id_ = str(form.get("payload", "")), _form_id(form)
    try:
        if id_ is None:
            raise Misuse("The form has no id. Submit it again.")
        new = copy_of(task, _parse(text), visitor.token, key=f"form {id_}")
        task_id = await call_ledger(lambda: _submit(new))
    except Unreachable:
        raise
    except CeleriacError as refused:
        return _form(request, task, Edited(text, id_ or uuid.uuid4(), refused.message, refused.remedy), status=422)
    return go_to(request, path_of(task_id), say=f"Submitted. This is the new task; it comes from {task.task_id}.")


def path_of(task_id: uuid.UUID) -> str:
    return f"{PREFIX}/tasks/{task_id}"


def require_submitter(token: Token, type_: str) -> None:
    """Raise Forbidden unless the token may submit tasks of this type to the API."""
    if not token.has_scope(Scope.TASKS_SUBMIT):
        raise Forbidden(f"The token {token.name} lacks the scope {Scope.TASKS_SUBMIT}.")
    token.require_type(type_)


def can_edit(payload: object) -> bool:
    """Return whether a form has room for the payload. Browsers send two characters for the end of each line."""
    text = as_json(payload)
    return len(text.encode()) + text.count("\n") <= LONGEST_EDITED


def copy_of(task: StoredTask, payload: object, token: Token, *, key: str) -> NewTask:
    """Return a new task that differs from the old one in its payload and its idempotency key only."""
    kept = {name: value for name, value in task.context.items() if name not in OWN}
    new = NewTask(
        task.type,
        payload,
        queue=task.queue,
        priority=task.priority,
        max_attempts=task.max_attempts,
        context={**kept, ORIGIN: str(task.task_id)},
        notify=task.notify,
    )
    return replace(owned_task(token, new, key=key), partition_key=task.partition_key)


def _reading(request: Request) -> Callable[[], StoredTask]:
    task_id = parse_task_id(request.path_params["id"])

    def read() -> StoredTask:
        with engine().connect() as connection:
            return read_task(connection, task_id)

    return read


def _submit(new: NewTask) -> uuid.UUID:
    with sessions().begin() as session:
        limit_lock_time(session)
        return submit_many(session, [new])[0].task_id


def _parse(text: str) -> object:
    """Return the payload. Raises Misuse with a sentence that says where it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Misuse(f"The payload is not JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise Misuse("The payload is nested too deep.") from None
    except ValueError as error:  # a number that is too long
        raise Misuse(f"The payload is not JSON: {error}.") from None


def _refuse_constant(_name: str) -> None:
    raise ValueError(NOT_FINITE)


def _form(request: Request, task: StoredTask, edited: Edited, *, status: int = 200) -> Response:
    return render(request, "task/edit.html", {"page": "tasks", "task": task, "edited": edited}, status=status)


def _form_id(form: FormData) -> uuid.UUID | None:
    try:
        return uuid.UUID(str(form.get("id", "")))
    except ValueError:
        return None


def _reason(form: FormData) -> str | None:
    """Return the reason without control characters, some of which the ledger cannot store."""
    given = "".join(each for each in str(form.get("reason", "")) if each.isprintable())
    return given.strip()[:LONGEST_REASON] or None


ROUTES: Final = [
    Route(f"{PREFIX}/tasks/{{id}}/run-now", run_now, methods=["POST"]),
    Route(f"{PREFIX}/tasks/{{id}}/requeue", requeue, methods=["POST"]),
    Route(f"{PREFIX}/tasks/{{id}}/discard", give_up, methods=["POST"]),
    Route(f"{PREFIX}/tasks/{{id}}/edit", edit),
    Route(f"{PREFIX}/tasks/{{id}}/edit", submit_again, methods=["POST"]),
]
