"""What a client may read about a failed task. Details are for operators: tracebacks, paths, SQL, addresses of servers.

A token with the scope `operate` reads a task as the ledger has it. Every other token reads the error code, one neutral
sentence for it, and a history without messages and without the names of processes.
"""

from __future__ import annotations

from typing import Any, Final

from api.json_responses import camel
from api.tokens import Scope, Token
from sinks.contract import Effect, EffectState
from tasks.core.outcomes import ErrorCode
from tasks.operations.listing import ListedTask
from tasks.operations.task_details import StoredTask, Transition
from tasks.operations.why_waiting import Reason, ReasonCode

SENTENCES: Final = {
    ErrorCode.HANDLER_ERROR: "The handler failed.",
    ErrorCode.PERMANENT: "The task can never succeed.",
    ErrorCode.TIMEOUT: "The task ran longer than it may.",
    ErrorCode.BAD_PAYLOAD: "The handler cannot use the payload.",
    ErrorCode.BAD_RESULT: "The result of the handler cannot be stored.",
    ErrorCode.WORKER_LOST: "The worker of the task was lost.",
}
OTHER: Final = "The task failed."
REASONS: Final = {
    ReasonCode.RUNNING: "A worker runs it.",
    ReasonCode.WORKER_LOST: "Its worker is lost; another one will run it.",
    ReasonCode.EXPIRED: "It expired before it started and will be discarded.",
    ReasonCode.NOT_ITS_TURN: "Earlier tasks with the same partition key come first.",
    ReasonCode.OVER_LIMIT: "It waits for the limit of its type.",
    ReasonCode.QUEUE_PAUSED: "Its queue is paused.",
    ReasonCode.UNKNOWN_QUEUE: "Its queue is not configured.",
    ReasonCode.UNKNOWN_HANDLER: "No worker that runs knows its type.",
    ReasonCode.BROKER_UNREACHABLE: "The broker is unreachable; the task will be woken when it is back.",
    ReasonCode.NO_WORKER: "No worker consumes its queue.",
    ReasonCode.WAKEUP_IN_OUTBOX: "Its wake-up waits in the outbox.",
    ReasonCode.WAKEUP_IN_BROKER: "Its wake-up waits in the broker.",
    ReasonCode.WAKEUP_LOST: "A worker has its wake-up, or it is lost and will be repeated.",
}
TIMES_ONLY: Final = (ReasonCode.FINAL, ReasonCode.NOT_DUE)  # their sentences say nothing that the task itself does not


def show_task(task: StoredTask, token: Token) -> dict[str, Any]:
    """Return the task as JSON objects show it, with details of its last error only if the token may operate."""
    shown = task.envelope()
    if not token.has_scope(Scope.OPERATE):
        shown["lastError"] = None
        shown["errorMessage"] = _neutral_sentence(task.error_code) if task.error_message is not None else None
    return shown


def show_listed(task: ListedTask, token: Token) -> dict[str, Any]:
    """Return a task as lists show it, with the handler's own message only if the token may operate."""
    shown = camel(task)
    if not token.has_scope(Scope.OPERATE):
        shown["errorMessage"] = _neutral_sentence(task.error_code) if task.error_message is not None else None
    return shown


def show_transition(transition: Transition, token: Token) -> dict[str, Any]:
    """Return one entry of a task's history, with message and actor only if the token may operate."""
    shown = camel(transition)
    return shown if token.has_scope(Scope.OPERATE) else {**shown, "message": None, "actor": None}


def show_effect(effect: Effect, token: Token) -> dict[str, Any]:
    """Return what a task did in a sink. Why a sink cannot be asked may contain addresses."""
    shown = camel(effect)
    is_hidden = effect.state is EffectState.UNKNOWN and not token.has_scope(Scope.OPERATE)
    return {**shown, "detail": None} if is_hidden else shown


def show_reason(reason: Reason, token: Token) -> dict[str, Any]:
    """Return why a task is not running. The full sentence may contain workers, addresses and the words of operators."""
    shown = camel(reason)
    is_open = token.has_scope(Scope.OPERATE) or reason.code in TIMES_ONLY
    return shown if is_open else {**shown, "message": REASONS[reason.code]}


def _neutral_sentence(code: str | None) -> str:
    return next((sentence for known, sentence in SENTENCES.items() if known == code), OTHER)
