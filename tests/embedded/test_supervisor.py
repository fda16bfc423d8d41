"""A supervisor starts all programs or none, restarts those that end, and stops them in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_process import ChildProcess, OwnProcess, StartFailed
from embedded import supervisor as module
from embedded.errors import Interrupted
from embedded.home import Home
from embedded.program import Program
from embedded.shutdown import stop_programs
from embedded.signals import Signals
from embedded.stack import Stack
from embedded.supervisor import Supervisor
from tests.servers import wait_until

READY = "import os, pathlib, time; pathlib.Path(os.environ['CELERIAC_READY_FILE']).touch(); "


def program(role: str, code: str = READY + "time.sleep(60)") -> Program:
    return Program(role, [sys.executable, "-c", code])


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    home.create()
    yield home
    stop_programs(home)


@pytest.fixture
def reports() -> list[str]:
    return []


def supervisor(home: Home, reports: list[str], *programs: Program, servers: tuple[Program, ...] = ()) -> Supervisor:
    return Supervisor(home, Stack(list(servers), list(programs), {"API_URL": "http://here"}), reports.append, Signals())


def pids(home: Home) -> dict[str, int]:
    return {path.stem: int(path.read_text().split()[0]) for path in (home.path / "run").glob("*.pid")}


def test_servers_start_first_then_the_schema_is_migrated_then_the_rest_starts(fresh: Home, reports: list[str]) -> None:
    running = supervisor(fresh, reports, program("worker"), servers=(program("postgres"),))
    seen: dict[str, int] = {}
    running.start(migrate=lambda: seen.update(pids(fresh)))
    assert seen.keys() == {"postgres"}
    assert pids(fresh).keys() == {"postgres", "worker"}
    assert fresh.stack == {"API_URL": "http://here"}
    running.stop()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("print('no luck'); raise SystemExit(7)", "flower ended with code 7:\nno luck"),
        ("import time; time.sleep(60)", "not ready"),
    ],
)
def test_a_program_that_does_not_start_leaves_nothing_running(
    code: str, sentence: str, fresh: Home, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_PATIENCE_SECONDS", 1.0)
    failing = supervisor(fresh, reports, program("worker"), program("flower", code), servers=(program("postgres"),))
    with pytest.raises(StartFailed, match=sentence):
        failing.start(migrate=lambda: None)
    started = [OwnProcess.of(pid) for role, pid in pids(fresh).items() if role in ("worker", "postgres")]
    assert len(started) == 2
    failing.stop()
    assert not any(process.is_alive() for process in started)
    assert list((fresh.path / "run").iterdir()) == []
    assert fresh.stack == {}


def test_a_missing_executable_is_reported_as_one_sentence(fresh: Home, reports: list[str]) -> None:
    failing = supervisor(fresh, reports, Program("worker", ["/no/such/program"]))
    with pytest.raises(StartFailed, match="worker could not be started: No such file"):
        failing.start(migrate=lambda: None)
    failing.stop()


def test_a_signal_during_the_start_stops_everything(fresh: Home, reports: list[str]) -> None:
    interrupted = supervisor(fresh, reports, program("worker", "import time; time.sleep(60)"))
    with interrupted.signals:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            interrupted.start(migrate=lambda: None)
    interrupted.stop()
    assert pids(fresh) == {}


def test_a_program_that_dies_is_restarted_after_a_growing_pause(fresh: Home, reports: list[str]) -> None:
    steady = supervisor(fresh, reports, program("worker"), program("beat"))
    steady.start(migrate=lambda: None)
    before = pids(fresh)
    now = time.monotonic()
    for pause in (1, 2, 4):
        victim = pids(fresh)["worker"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: steady.running["worker"].exit_code() is not None, "the program ends")
        steady.restart_ended(now)
        assert reports[-1] == f"worker ended with code -9; restarting it in {pause} s"
        steady.restart_ended(now + pause - 0.1)
        assert pids(fresh)["worker"] == victim  # the pid file stays, so that `ps` shows the program as stopped
        steady.restart_ended(now + pause)
        assert pids(fresh)["worker"] != victim
    assert pids(fresh)["beat"] == before["beat"]
    steady.stop()


def test_a_program_that_ran_for_long_is_restarted_soon(fresh: Home, reports: list[str]) -> None:
    steady = supervisor(fresh, reports, program("worker"))
    steady.start(migrate=lambda: None)
    steady._pauses["worker"] = 30.0
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the program ends")
    steady.restart_ended(time.monotonic() + module.STEADY_SECONDS + 1)
    assert reports[-1].endswith("in 1 s")
    steady.stop()


def test_children_of_a_killed_program_are_killed_too(fresh: Home, reports: list[str]) -> None:
    spawns = "import subprocess; subprocess.Popen(['sleep', '60']); "
    steady = supervisor(fresh, reports, program("worker", spawns + READY + "time.sleep(60)"))
    steady.start(migrate=lambda: None)
    ready_file = str(fresh.ready_file("worker"))
    family = OwnProcess.with_variable("CELERIAC_READY_FILE", ready_file)
    assert len(family) == 2
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the program ends")
    steady.restart_ended(time.monotonic())
    assert not any(process.is_alive() for process in family)
    steady.stop()


def test_workers_stop_before_the_servers_they_need(fresh: Home, reports: list[str], tmp_path: Path) -> None:
    order = tmp_path / "order"

    def noting(role: str) -> Program:
        note = f"lambda *_: (open({str(order)!r}, 'a').write({role!r} + ' '), os._exit(0))"
        return program(role, f"import os, signal; [signal.signal(s, {note}) for s in (2, 15)]; {READY} time.sleep(60)")

    running = supervisor(fresh, reports, noting("worker"), noting("beat"), servers=(noting("postgres"),))
    running.start(migrate=lambda: None)
    running.stop()
    assert order.read_text().split() == ["beat", "worker", "postgres"]


def test_a_program_whose_pid_file_was_lost_is_stopped_too(fresh: Home, reports: list[str]) -> None:
    running = supervisor(fresh, reports, program("worker"))
    running.start(migrate=lambda: None)
    worker = running.running["worker"].process
    fresh.pid_file("worker").unlink()
    running.stop()
    assert not worker.is_alive()


def test_a_program_that_cannot_be_restarted_is_tried_again_while_the_others_run(
    fresh: Home, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = supervisor(fresh, reports, program("worker"), program("beat"))
    steady.start(migrate=lambda: None)
    now = time.monotonic()
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the program ends")
    steady.restart_ended(now)

    def disk_is_full(_program: Program, _home: Home) -> ChildProcess:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Program, "start", disk_is_full)
    steady.restart_ended(now + 1)
    assert reports[-1] == "worker could not be started: No space left on device."
    assert steady.running["beat"].exit_code() is None
    monkeypatch.undo()
    steady.restart_ended(now + 2)
    steady.restart_ended(now + 60)
    assert reports[-1].startswith("worker restarted")
    steady.stop()


def test_a_program_whose_pid_file_cannot_be_written_is_killed(
    fresh: Home, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(_self: OwnProcess, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OwnProcess, "write", disk_is_full)
    failing = supervisor(fresh, reports, program("worker"))
    with pytest.raises(StartFailed, match="No space left"):
        failing.start(migrate=lambda: None)
    assert OwnProcess.with_variable("CELERIAC_READY_FILE", str(fresh.ready_file("worker"))) == []
