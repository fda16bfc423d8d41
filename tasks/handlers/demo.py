"""demo.flaky: for trying failures. Its payload says what should happen.

{"fail": 2}            fail so many times, then succeed          {"sleep": 0.5}    take so long
{"snooze": 60}         once, then succeed                        {"discard": "why"}, {"permanent": "why"}
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy.orm import Session

from tasks.core.outcomes import Discard, Permanent, Snooze
from tasks.core.registry import handler
from tasks.core.task import Task


@handler("demo.flaky")
def flaky(task: Task, _db: Session) -> Any:
    wish = task.payload if isinstance(task.payload, dict) else {}
    time.sleep(min(float(wish.get("sleep", 0)), 60))
    if "permanent" in wish:
        raise Permanent(str(wish["permanent"]))
    if "discard" in wish:
        raise Discard(str(wish["discard"]))
    if "snooze" in wish and task.due_at is None:
        raise Snooze(float(wish["snooze"]))
    if task.attempt_count < int(wish.get("fail", 0)):
        raise RuntimeError(f"failure {task.attempt_count + 1} of {wish['fail']}, as the payload asked for")
    return {"attempts": task.attempt_count + 1}
