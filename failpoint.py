"""Named places in the code where a test can kill, stop or delay the process. Unarmed, they cost a comparison with None.

    FAILPOINTS="relay.after_publish=kill@3;lease.renew=raise;sink.after_prepare=sleep:30@1"

`name=action@n` acts on the n-th pass (default: the first). Actions: `kill` (SIGKILL to this process), `pause`
(SIGSTOP), `exit` (without clean-up), `raise` (a `FailpointHit`), `sleep:SECONDS`. FAILPOINT_TRACE names a file that
gets one line per pass, so that a test can prove that a place was reached.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXIT_CODE: Final = 70
_ACTIONS: Final = ("kill", "pause", "exit", "raise", "sleep")


class FailpointHit(Exception):
    """Raised by a failpoint whose action is `raise`."""


@dataclass(slots=True)
class _Plan:
    actions: dict[str, tuple[str, int]]
    trace: Path | None
    passes: dict[str, int]
    lock: threading.Lock


_plan: _Plan | None = None


def failpoint(name: str) -> None:
    """Mark a place where a test can interfere."""
    if _plan is not None:
        _pass(_plan, name)


def arm(actions: str = "", trace: str = "") -> None:
    """Arm this process and the processes it forks. Without arguments, disarm it."""
    global _plan  # noqa: PLW0603 - one plan per process, replaced as a whole
    _plan = _Plan(_parse(actions), Path(trace) if trace else None, {}, threading.Lock()) if actions or trace else None


def _parse(text: str) -> dict[str, tuple[str, int]]:
    actions = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, rest = entry.partition("=")
        action, _, nth = rest.partition("@")
        if not equals or action.partition(":")[0] not in _ACTIONS or not (nth or "1").isdecimal():
            raise ValueError(
                f"FAILPOINTS: {entry!r} is not name=action@n, where action is one of {', '.join(_ACTIONS)}"
            )
        actions[name] = (action, int(nth or 1))
    return actions


def _pass(plan: _Plan, name: str) -> None:
    if plan.trace:
        descriptor = os.open(plan.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{name}\n".encode())  # a single write, so that lines of several processes do not mix
        os.close(descriptor)
    action, nth = plan.actions.get(name, ("", 0))
    if not action:
        return
    with plan.lock:
        plan.passes[name] = plan.passes.get(name, 0) + 1
        if plan.passes[name] != nth:
            return
    match action.partition(":"):
        case ("kill", _, _):
            os.kill(os.getpid(), signal.SIGKILL)
        case ("pause", _, _):
            os.kill(os.getpid(), signal.SIGSTOP)
        case ("exit", _, _):
            os._exit(EXIT_CODE)
        case ("raise", _, _):
            raise FailpointHit(name)
        case ("sleep", _, seconds):
            time.sleep(float(seconds))


arm(os.environ.get("FAILPOINTS", ""), os.environ.get("FAILPOINT_TRACE", ""))
