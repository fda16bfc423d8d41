"""Failpoints act at the named place and on the requested pass, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import failpoint as module
from failpoint import EXIT_CODE, FailpointHit, arm, failpoint
from settings import ROOT

PASS_TWICE = "from failpoint import failpoint; failpoint('a'); failpoint('b'); failpoint('a'); print('through')"


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    arm()


def run(actions: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FAILPOINTS": actions} | more
    return subprocess.run(
        [sys.executable, "-c", PASS_TWICE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_an_unarmed_failpoint_does_nothing() -> None:
    failpoint("anything")
    assert module._plan is None


def test_a_failpoint_acts_on_the_requested_pass_only() -> None:
    arm("a=raise@2")
    failpoint("a")
    failpoint("b")
    with pytest.raises(FailpointHit, match="a"):
        failpoint("a")
    failpoint("a")


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE)])
def test_a_failpoint_ends_the_process_without_clean_up(action: str, code: int) -> None:
    ended = run(f"a={action}@2")
    assert (ended.returncode, ended.stdout) == (code, "")
    assert run("c=kill").stdout == "through\n"


def test_a_paused_process_can_continue() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PASS_TWICE], cwd=ROOT, env=os.environ | {"FAILPOINTS": "b=pause"}, stdout=subprocess.PIPE
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == b"through\n"


def test_the_trace_lists_the_places_that_were_passed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    run("", FAILPOINT_TRACE=str(trace))
    assert trace.read_text().split() == ["a", "b", "a"]


@pytest.mark.parametrize("wrong", ["a", "a=explode", "a=kill@soon", "a=kill@"])
def test_a_misspelt_failpoint_is_an_error_instead_of_never_acting(wrong: str) -> None:
    if wrong == "a=kill@":
        arm(wrong)  # no number means the first pass
    else:
        with pytest.raises(ValueError, match="name=action@n"):
            arm(wrong)
