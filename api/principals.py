"""Whose task it is. A task that came over HTTP carries the name of its token in `context.principal`.

The door writes it, whatever the client says, and puts it before the key (`principal:key`, P10): the same key of two
principals is two tasks. A token with `tasks:read` sees the tasks of its own principal, one with `tasks:read-all` sees
every task. What a token may not see does not exist for it.

Submitting waits for another transaction that holds the same key, but not for ever: a thread of the API waits with it.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from api.tokens import Scope, Token
from tasks.operations.listing import UnknownTask
from tasks.operations.task_details import ShownTask, shown
from tasks.submission.envelope import BadTask, NewTask
from tasks.submission.submit import Submitted, submit_many

PRINCIPAL: Final = "principal"
LOCK_SECONDS: Final = 10.0
BOUND_THE_WAIT: Final = text("SELECT set_config('lock_timeout', :milliseconds, true)")  # of this transaction


def submit_for(session: Session, token: Token, new: NewTask, *, key: str | None = None) -> Submitted:
    """`key` is the header's; the task may name the same one itself."""
    if key is not None and new.key not in (None, key):
        raise BadTask("The header Idempotency-Key and context.idempotencyKey are two keys; a task has one.")
    key = new.key if key is None else key
    if key == "":
        raise BadTask("The key is empty.")
    owned = replace(
        new,
        key=None if key is None else f"{token.name}:{key}",
        context={**new.context, PRINCIPAL: token.name},
    )
    session.execute(BOUND_THE_WAIT, {"milliseconds": str(round(LOCK_SECONDS * 1000))})
    return submit_many(session, [owned])[0]


def visible(connection: Connection, token: Token, task_id: uuid.UUID) -> ShownTask:
    """Raises UnknownTask: of a task that is somebody else's, too."""
    task = shown(connection, task_id)
    if token.may(Scope.TASKS_READ_ALL) or task.context.get(PRINCIPAL) == token.name:
        return task
    raise UnknownTask(task_id)
