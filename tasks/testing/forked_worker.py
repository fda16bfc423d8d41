"""Worker processes that die on purpose: forks of this process, which has loaded everything, that run the real code.

A fork costs milliseconds where a Celery worker costs seconds. It shares no connection with this process, and it never
runs the rest of the caller's code: it ends when its work ends, at a failpoint, or after `LONGEST_SECONDS`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import failpoint

LONGEST_SECONDS: Final = 60.0
FAILED: Final = 1  # the exit code if the work raises, or takes too long


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process has ended, or that it has suspended itself."""

    status: int  # of waitpid

    @property
    def was_killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def is_suspended(self) -> bool:
        return os.WIFSTOPPED(self.status)

    @property
    def is_clean(self) -> bool:
        return os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == 0

    def __str__(self) -> str:
        if os.WIFSIGNALED(self.status):
            return f"ended by {signal.Signals(os.WTERMSIG(self.status)).name}"
        return "suspended" if self.is_suspended else f"exited with code {os.WEXITSTATUS(self.status)}"


def start(work: Callable[[], object], *, failpoints: str = "", trace: str = "") -> int:
    """Fork a process that does the work, and return its pid. `failpoints` and `trace` are those of `failpoint.py`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise both processes would print what is waiting
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; ours have nothing to do now
        pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True, file=sys.__stderr__ or 2)
        failpoint.arm(failpoints, trace)
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def wait(pid: int) -> Ending:
    """Wait until the process ends or suspends itself."""
    return Ending(os.waitpid(pid, os.WUNTRACED)[1])


def go_on(pid: int) -> None:
    """Continue a suspended process."""
    os.kill(pid, signal.SIGCONT)


def end(pid: int) -> None:
    """Kill the process and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
