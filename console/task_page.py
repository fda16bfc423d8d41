"""The page of one task: what it is doing, why it is not running, what became of it, and where it is.

A task that was accepted and is not saved yet is known to the receipt log only; the page then says so, and becomes the
page of the task when it is saved.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import settings
from api.ledger_calls import call_ledger
from api.receiving import receiving
from api.tasks import parse_task_id
from api.tokens import SCOPE_OF_TYPE, Forbidden, Scope, Token
from console import task_actions
from console.custody import Evidence, custody, custody_of_unsaved
from console.door import PREFIX
from console.formats import as_json, number
from console.pages import render
from console.task_advice import advice
from console.task_facts import Facts, ask_servers, hide, hide_effects, read_facts, why
from console.task_texts import LONGEST_SEARCH, PARTS, texts_of, value_of
from console.timeline import draw
from console.visitors import READERS, require_visitor
from models.clock import now
from models.engine import engine
from models.receipts import Level
from models.status import TaskStatus
from receipts.errors import ReceiptLogUnreachable, UnknownReceipt
from receipts.receipt import Receipt
from tasks.operations.listing import FINAL, UnknownTask
from tasks.operations.task_details import Lease, StoredTask, read_task

REFRESH_SECONDS: Final = 2
REFRESH_FINAL_SECONDS: Final = 10
MOST_AUDITS: Final = 100
HOLDER: Final = re.compile(r"(?P<host>.+):(?P<process>\d+)-[^-]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease. Host and process are empty if another program gave the name."""

    name: str
    host: str = ""
    process: str = ""


@dataclass(frozen=True, slots=True)
class Possible:
    """What an operator can do with the task now."""

    run_now: bool
    requeue: bool
    discard: bool
    submit_again: bool
    why_not: str  # why it cannot be submitted again


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    task_id = parse_task_id(request.path_params["id"])
    search = request.query_params.get("find", "").strip()[:LONGEST_SEARCH]
    try:
        known = await call_ledger(partial(read_facts, task_id))
    except UnknownTask:
        return await _show_unsaved(request, task_id)
    waiting, found = await ask_servers(known)
    effects = hide_effects(found, visitor.token)
    facts = hide(known, visitor.token)
    details = facts.details
    task = details.task
    evidence = Evidence(
        details,
        facts.events,
        facts.is_unreachable,
        waiting,
        facts.sinks,
        [effect for each in effects for effect in (each.effects if each.effects is not None else [None])],
        facts.receipt,
        timedelta(milliseconds=settings.current().ingest_wakeup_grace_ms),
    )
    is_final = task.status in FINAL
    values = {
        "page": "tasks",
        "refresh": REFRESH_FINAL_SECONDS if is_final else REFRESH_SECONDS,
        "task": task,
        "details": details,
        "facts": facts,
        "now": details.now,
        "reasons": [advice(each, details) for each in why(known, waiting, visitor.token)],
        "question": _question(task.status),
        "hops": custody(evidence),
        "timeline": draw(details.transitions, details.now, older=details.older_transitions),
        "effects": effects,
        "holder": _holder(details.lease),
        "is_lease_lost": details.lease is not None and details.lease.lease_until <= details.now,
        "texts": await asyncio.to_thread(texts_of, task, search),  # long ones must not hold up other requests
        "search": search,
        "longest_search": LONGEST_SEARCH,
        "origin": _origin(task),
        "most_audits": MOST_AUDITS,
        "can": await asyncio.to_thread(_possible, facts, visitor.token),
    }
    return render(request, "task.html", values)


async def show_text(request: Request) -> Response:
    """Answer with a payload, a context or a result alone, complete."""
    await require_visitor(request, *READERS)
    task_id, part = parse_task_id(request.path_params["id"]), request.path_params["part"]
    if part not in PARTS:
        raise UnknownTask(task_id)

    def read() -> str:
        with engine().connect() as connection:
            task = read_task(connection, task_id)
        return as_json(value_of(part, task))

    return Response(await call_ledger(read), media_type="text/plain; charset=utf-8")


async def _show_unsaved(request: Request, task_id: uuid.UUID) -> Response:
    """Say what the receipt log knows about a task that the ledger does not have."""
    receipt: Receipt | None = None
    try:
        receipt = await receiving().find(task_id)
    except UnknownReceipt:
        raise UnknownTask(task_id) from None
    except ReceiptLogUnreachable:
        pass  # it may have been accepted, so this is not a task that does not exist
    if receipt is not None and receipt.level is Level.SAVED:
        if receipt.task_id in (None, task_id):
            raise UnknownTask(task_id)  # it was saved, and pruned since
        return RedirectResponse(f"{PREFIX}/tasks/{receipt.task_id}", status_code=303)
    values = {"page": "tasks", "task_id": task_id, "receipt": receipt, "refresh": REFRESH_SECONDS}
    values["hops"] = custody_of_unsaved(receipt, await call_ledger(_read_clock)) if receipt is not None else []
    return render(request, "task/unsaved.html", values, status=200 if receipt is not None else 503)


def _read_clock() -> datetime:
    with engine().connect() as connection:
        return now(connection)


def _question(status: str) -> str:
    match status:
        case TaskStatus.RUNNING:
            return "What is it doing?"
        case TaskStatus.QUEUED | TaskStatus.RETRYING:
            return "Why is it not running?"
    return "What became of it?"


def _holder(lease: Lease | None) -> Holder | None:
    if lease is None or not lease.holder:
        return None
    found = HOLDER.fullmatch(lease.holder)
    return Holder(lease.holder, found["host"], found["process"]) if found else Holder(lease.holder)


def _origin(task: StoredTask) -> str | None:
    """Return the task of which this one is an edited copy."""
    given = task.context.get(task_actions.ORIGIN)
    try:
        return str(uuid.UUID(given)) if isinstance(given, str) else None
    except ValueError:
        return None


def _possible(facts: Facts, token: Token) -> Possible | None:
    """Return what the visitor can do; None if nothing, because the token may not operate."""
    if not token.has_scope(task_actions.ACTS):
        return None
    details, task = facts.details, facts.details.task
    is_open = task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING)
    is_later = task.next_retry_at is not None and task.next_retry_at > details.now
    why_not = ""
    try:
        task_actions.require_submitter(token, task.type)
    except Forbidden:
        scopes = (Scope.TASKS_SUBMIT, SCOPE_OF_TYPE.get(task.type, Scope.TASKS_SUBMIT))
        scope = next((each for each in scopes if not token.has_scope(each)), None)
        why_not = f"your token lacks the scope {scope}" if scope else "your token may not submit this type"
    if not why_not and not task_actions.can_edit(task.payload):
        why_not = f"the payload is longer than {number(task_actions.LONGEST_EDITED)} bytes"
    return Possible(
        is_open and is_later,
        task.status == TaskStatus.DEAD,
        task.status not in (TaskStatus.SUCCEEDED, TaskStatus.DISCARDED),
        not why_not,
        why_not,
    )


ROUTES: Final = [
    Route(f"{PREFIX}/tasks/{{id}}", show),
    Route(f"{PREFIX}/tasks/{{id}}/text/{{part}}", show_text),
    *task_actions.ROUTES,
]
