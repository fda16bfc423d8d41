"""Run tasks whose handler is outside a transaction, in this process."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from tasks.core.task import Task
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.work import task

TYPE: Final = "test.outside"


def ran(script: Callable[[Task], Any], *, times: int = 1, payload: Any = None, **how: Any) -> uuid.UUID:
    """Submit one task that runs `script`, and deliver it `times` times; there is no backoff."""
    with handled(TYPE, script, transactional=False, **{"backoff": [0], **how}):
        (id_,) = submitted(1, TYPE, payload)
        for _ in range(times):
            delivered([id_])
    return id_


def state(id_: uuid.UUID) -> tuple[str, int, str | None]:
    found = task(id_)
    return found["status"], found["attempt_count"], found["error_code"]
