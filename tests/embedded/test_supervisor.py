"""A supervisor starts all or nothing, starts again what ends, and stops in order. Its parts here are small programs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded import supervisor as module
from embedded.errors import Interrupted, StartFailed
from embedded.home import Home
from embedded.part import Part
from embedded.process import Process
from embedded.signals import Signals
from embedded.stack import Stack
from embedded.stop_parts import stop_parts
from embedded.supervisor import Supervisor
from tests.servers import wait_until

READY = "import os, pathlib, time; pathlib.Path(os.environ['CELERIAC_READY_FILE']).touch(); "


def part(role: str, code: str = READY + "time.sleep(60)") -> Part:
    return Part(role, [sys.executable, "-c", code])


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    home.create()
    yield home
    stop_parts(home)


@pytest.fixture
def told() -> list[str]:
    return []


def supervisor(home: Home, told: list[str], *parts: Part, servers: tuple[Part, ...] = ()) -> Supervisor:
    return Supervisor(home, Stack(list(servers), list(parts), {"API_URL": "http://here"}), told.append, Signals())


def pids(home: Home) -> dict[str, int]:
    return {path.stem: int(path.read_text().split()[0]) for path in (home.path / "run").glob("*.pid")}


def test_servers_come_first_then_the_schema_then_the_parts(fresh: Home, told: list[str]) -> None:
    running = supervisor(fresh, told, part("worker"), servers=(part("postgres"),))
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
def test_a_part_that_does_not_start_leaves_nothing_running(
    code: str, sentence: str, fresh: Home, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_PATIENCE_SECONDS", 1.0)
    failing = supervisor(fresh, told, part("worker"), part("flower", code), servers=(part("postgres"),))
    with pytest.raises(StartFailed, match=sentence):
        failing.start(migrate=lambda: None)
    started = [Process.of(pid) for role, pid in pids(fresh).items() if role in ("worker", "postgres")]
    assert len(started) == 2
    failing.stop()
    assert not any(process.is_alive() for process in started)
    assert list((fresh.path / "run").iterdir()) == []
    assert fresh.stack == {}


def test_a_missing_program_is_a_sentence(fresh: Home, told: list[str]) -> None:
    failing = supervisor(fresh, told, Part("worker", ["/no/such/program"]))
    with pytest.raises(StartFailed, match="worker could not be started: No such file"):
        failing.start(migrate=lambda: None)
    failing.stop()


def test_a_signal_during_the_start_stops_it(fresh: Home, told: list[str]) -> None:
    interrupted = supervisor(fresh, told, part("worker", "import time; time.sleep(60)"))
    with interrupted.signals:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            interrupted.start(migrate=lambda: None)
    interrupted.stop()
    assert pids(fresh) == {}


def test_a_part_that_dies_is_started_again_with_a_growing_wait(fresh: Home, told: list[str]) -> None:
    steady = supervisor(fresh, told, part("worker"), part("beat"))
    steady.start(migrate=lambda: None)
    before = pids(fresh)
    now = time.monotonic()
    for wait in (1, 2, 4):
        victim = pids(fresh)["worker"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: steady.running["worker"].exit_code() is not None, "the part ends")
        steady._start_again_what_ended(now)
        assert told[-1] == f"worker ended with code -9; starting it again in {wait} s"
        steady._start_again_what_ended(now + wait - 0.1)
        assert pids(fresh)["worker"] == victim  # still named, so that `ps` shows it as stopped
        steady._start_again_what_ended(now + wait)
        assert pids(fresh)["worker"] != victim
    assert pids(fresh)["beat"] == before["beat"]
    steady.stop()


def test_a_part_that_ran_steadily_is_started_again_soon(fresh: Home, told: list[str]) -> None:
    steady = supervisor(fresh, told, part("worker"))
    steady.start(migrate=lambda: None)
    steady._waits["worker"] = 30.0
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the part ends")
    steady._start_again_what_ended(time.monotonic() + module.STEADY_SECONDS + 1)
    assert told[-1].endswith("in 1 s")
    steady.stop()


def test_children_of_a_killed_part_do_not_survive_it(fresh: Home, told: list[str]) -> None:
    spawns = "import subprocess; subprocess.Popen(['sleep', '60']); "
    steady = supervisor(fresh, told, part("worker", spawns + READY + "time.sleep(60)"))
    steady.start(migrate=lambda: None)
    ready_file = str(fresh.ready_file("worker"))
    family = Process.marked("CELERIAC_READY_FILE", ready_file)
    assert len(family) == 2
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the part ends")
    steady._start_again_what_ended(time.monotonic())
    assert not any(process.is_alive() for process in family)
    steady.stop()


def test_work_stops_before_the_servers_it_needs(fresh: Home, told: list[str], tmp_path: Path) -> None:
    order = tmp_path / "order"

    def noting(role: str) -> Part:
        note = f"lambda *_: (open({str(order)!r}, 'a').write({role!r} + ' '), os._exit(0))"
        return part(role, f"import os, signal; [signal.signal(s, {note}) for s in (2, 15)]; {READY} time.sleep(60)")

    running = supervisor(fresh, told, noting("worker"), noting("beat"), servers=(noting("postgres"),))
    running.start(migrate=lambda: None)
    running.stop()
    assert order.read_text().split() == ["beat", "worker", "postgres"]


def test_a_part_whose_pid_file_was_lost_is_stopped_all_the_same(fresh: Home, told: list[str]) -> None:
    running = supervisor(fresh, told, part("worker"))
    running.start(migrate=lambda: None)
    worker = running.running["worker"].process
    fresh.pid_file("worker").unlink()
    running.stop()
    assert not worker.is_alive()


def test_a_part_that_cannot_be_started_again_waits_and_the_others_go_on(
    fresh: Home, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = supervisor(fresh, told, part("worker"), part("beat"))
    steady.start(migrate=lambda: None)
    now = time.monotonic()
    os.kill(pids(fresh)["worker"], signal.SIGKILL)
    wait_until(lambda: steady.running["worker"].exit_code() is not None, "the part ends")
    steady._start_again_what_ended(now)

    def disk_is_full(_home: Home, _part: Part) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "Running", disk_is_full)
    steady._start_again_what_ended(now + 1)
    assert told[-1] == "worker could not be started: No space left on device."
    assert steady.running["beat"].exit_code() is None
    monkeypatch.undo()
    steady._start_again_what_ended(now + 2)
    steady._start_again_what_ended(now + 60)
    assert told[-1].startswith("worker started again")
    steady.stop()


def test_a_part_whose_pid_cannot_be_written_down_does_not_run_on(
    fresh: Home, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(_self: Process, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Process, "write", disk_is_full)
    failing = supervisor(fresh, told, part("worker"))
    with pytest.raises(StartFailed, match="No space left"):
        failing.start(migrate=lambda: None)
    assert Process.marked("CELERIAC_READY_FILE", str(fresh.ready_file("worker"))) == []
