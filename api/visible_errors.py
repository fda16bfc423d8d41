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
from tasks.operations.task_details import StoredTask, Transition

SENTENCES: Final = {
    ErrorCode.HANDLER_ERROR: "The handler failed.",
    ErrorCode.PERMANENT: "The task can never succeed.",
    ErrorCode.TIMEOUT: "The task ran longer than it may.",
    ErrorCode.BAD_PAYLOAD: "The handler cannot use the payload.",
    ErrorCode.BAD_RESULT: "The result of the handler cannot be stored.",
    ErrorCode.WORKER_LOST: "The worker of the task was lost.",
}
OTHER: Final = "The task failed."


def show_task(task: StoredTask, token: Token) -> dict[str, Any]:
    """Return the task as JSON objects show it, with details of its last error only if the token may operate."""
    shown = task.envelope()
    if not token.has_scope(Scope.OPERATE):
        shown["lastError"] = None
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


def _neutral_sentence(code: str | None) -> str:
    return next((sentence for known, sentence in SENTENCES.items() if known == code), OTHER)
