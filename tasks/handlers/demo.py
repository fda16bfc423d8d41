"""demo.flaky: a handler for trying out failures. The payload says what should happen.

{"fail": 2}        fail twice, then succeed       {"sleep": 0.5}            sleep for 0.5 s (at most 60 s) first
{"snooze": 60}     snooze once, then succeed      {"discard": "why"}, {"permanent": "why"}
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy.orm import Session

from tasks import Discard, Permanent, Snooze, Task, handler


@handler("demo.flaky")
def flaky(task: Task, _db: Session) -> Any:
    options = task.payload if isinstance(task.payload, dict) else {}
    time.sleep(min(float(options.get("sleep", 0)), 60))
    if "permanent" in options:
        raise Permanent(str(options["permanent"]))
    if "discard" in options:
        raise Discard(str(options["discard"]))
    if "snooze" in options and task.due_at is None:
        raise Snooze(float(options["snooze"]))
    if task.attempt_count < int(options.get("fail", 0)):
        raise RuntimeError(f"failure {task.attempt_count + 1} of {options['fail']}, as the payload asked for")
    return {"attempts": task.attempt_count + 1}
