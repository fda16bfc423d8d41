"""Who owns a task. A task that was submitted over HTTP has the name of its token in `context.principal`.

The API writes the principal, whatever the client sent, and puts it before idempotency keys and partition keys
(`principal:key`). So the same key of two principals names two tasks, and no principal can block the partition key of
another. It submits only types that the token allows.

A token with `tasks:read` sees the tasks of its own principal, a token with `tasks:read-all` or `operate` sees all. A
token with `tasks:submit` may cancel and retry the tasks of its own principal, a token with `operate` all. A task that a
token may not see or change is answered like a task that does not exist.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

import workflows
from api.tokens import Scope, Token
from tasks.operations.listing import UnknownTask
from tasks.operations.task_details import StoredTask, read_task
from tasks.submission.envelope import BadTask, NewTask, with_trace
from tasks.submission.submit import Submitted, submit_many

PRINCIPAL: Final = "principal"
# How long a submit waits for another transaction with the same key: less than the deadline of a call to the ledger, so
# that the answer says `ledger_busy`.
LOCK_SECONDS: Final = 2.5


def submit_for(session: Session, token: Token, new: NewTask, *, key: str | None = None) -> Submitted:
    """Submit a task for the token's principal. `key` comes from the header; the task may name the same key itself."""
    owned = owned_task(token, new, key=key)
    limit_lock_time(session)
    return submit_many(session, [owned])[0]


def limit_lock_time(session: Session) -> None:
    """Wait for another transaction with the same key only so long that the answer can say so."""
    session.execute(select(func.set_config("lock_timeout", f"{round(LOCK_SECONDS * 1000)}ms", True)))


def owned_task(token: Token, new: NewTask, *, key: str | None = None) -> NewTask:
    """Return the task as the token's principal submits it.

    A type that the token does not allow, and a workflow that cannot run, are rejected on every route.
    """
    token.require_type(new.type)
    if new.type == workflows.TYPE:
        workflows.check(new.payload)
    if key is not None and new.key not in (None, key):
        raise BadTask("The header Idempotency-Key and context.idempotencyKey differ; send only one of them.")
    key = new.key if key is None else key
    if key == "":
        raise BadTask("The idempotency key is empty.")
    return replace(
        new,
        key=None if key is None else f"{token.name}:{key}",
        partition_key=None if new.partition_key is None else _own_partition_key(token, new.partition_key),
        context={**with_trace(new.context), PRINCIPAL: token.name},
    )


def read_visible_task(connection: Connection, token: Token, task_id: uuid.UUID) -> StoredTask:
    """Return the task, or raise UnknownTask if it does not exist or the token may not see it."""
    task = read_task(connection, task_id)
    if sees_all(token) or _is_own(task, token):
        return task
    raise UnknownTask(task_id)


def sees_all(token: Token) -> bool:
    """Return whether the token sees the tasks of all principals."""
    return token.has_scope(Scope.TASKS_READ_ALL, Scope.OPERATE)


def require_changeable(connection: Connection, token: Token, task_id: uuid.UUID) -> None:
    """Raise UnknownTask if the task does not exist or the token may not change it."""
    task = read_task(connection, task_id)
    if not (token.has_scope(Scope.OPERATE) or _is_own(task, token)):
        raise UnknownTask(task_id)


def actor_of(token: Token) -> str:
    """Return the name under which the history of a task shows what the token did."""
    return f"api:{token.name}"


def _is_own(task: StoredTask, token: Token) -> bool:
    return task.context.get(PRINCIPAL) == token.name


def _own_partition_key(token: Token, key: str) -> str:
    """Return `principal:key`. A key in this form stays as it is, so that a shown task can be submitted again."""
    if key == "":
        raise BadTask("The partition key is empty.")
    return key if key.startswith(f"{token.name}:") else f"{token.name}:{key}"
