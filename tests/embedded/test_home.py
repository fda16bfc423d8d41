"""The folder of a stack is private, its secrets are created once, and its ports are kept."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from child_process import OwnProcess
from embedded.home import Home, HomeUnusable


@pytest.fixture
def fresh(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_other_users_cannot_read_a_home(fresh: Home) -> None:
    assert mode(fresh.path) == 0o700
    assert mode(fresh.path / "secrets.json") == 0o600
    fresh.path.chmod(0o755)
    fresh.create()
    assert mode(fresh.path) == 0o700


def test_secrets_are_created_once_and_differ_between_homes(fresh: Home, tmp_path: Path) -> None:
    before = fresh.secrets
    fresh.create()
    assert fresh.secrets == before
    other = Home(tmp_path / "other")
    other.create()
    assert not set(before.values()) & set(other.secrets.values())
    assert min(map(len, before.values())) >= 32


def test_two_supervisors_cannot_lock_one_home(fresh: Home) -> None:
    assert fresh.lock()
    rival = Home(fresh.path)
    assert not rival.lock()
    fresh.unlock()
    assert rival.lock()
    rival.unlock()


def test_ports_are_kept_and_a_port_in_use_is_replaced(fresh: Home) -> None:
    first = fresh.ports({"api": 0, "flower": 0}, wished={})
    assert fresh.ports({"api": 0, "flower": 0}, wished={}) == first
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", first["api"]))
        squatter.listen()
        moved = fresh.ports({"api": 0, "flower": 0}, wished={})
    assert moved["api"] != first["api"]
    assert moved["flower"] == first["flower"]
    assert fresh.ports({"api": 0, "flower": 0}, wished={}) == moved


def test_two_roles_never_get_the_same_port(fresh: Home) -> None:
    free = fresh.ports({"x": 0}, wished={})["x"]
    ports = fresh.ports({"a": free, "b": free, "c": free}, wished={})
    assert len(set(ports.values())) == 3


def test_a_wished_port_wins_over_the_remembered_one(fresh: Home) -> None:
    fresh.ports({"api": 0}, wished={})
    wish = fresh.ports({"x": 0}, wished={})["x"]
    assert fresh.ports({"api": 0}, wished={"api": wish})["api"] == wish


@pytest.mark.parametrize("place", ["/proc/celeriac", "file/home"])
def test_a_folder_that_cannot_be_created_is_reported_as_one_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HomeUnusable, match="cannot be used"):
        Home(tmp_path / place).create()


def test_a_copied_home_does_not_refer_to_the_stack_of_the_original(fresh: Home, tmp_path: Path) -> None:
    fresh.write_stack({"API_URL": "http://here"})
    OwnProcess.of(os.getpid()).write(fresh.pid_file("worker"))
    assert fresh.stack == {"API_URL": "http://here"}
    copy = Home(tmp_path / "copy")
    shutil.copytree(fresh.path, copy.path)
    assert copy.stack == {}
    assert OwnProcess.read(copy.pid_file("worker")) is None
    assert OwnProcess.read(fresh.pid_file("worker")) is not None


def test_a_stack_from_before_a_reboot_does_not_count_as_running(fresh: Home) -> None:
    fresh.write_stack({"API_URL": "http://here"})
    path = fresh.path / "stack.json"
    boot = json.loads(path.read_text())["MARK"].partition("@")[2]
    path.write_text(path.read_text().replace(boot, "an-earlier-boot") if boot else "{}")
    assert fresh.stack == {}


def test_a_folder_with_other_files_is_not_used_as_a_home(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    tmp_path.chmod(0o755)
    with pytest.raises(HomeUnusable, match="contains other files"):
        Home(tmp_path).create()
    assert mode(tmp_path) == 0o755


def test_a_damaged_ports_file_is_ignored(fresh: Home) -> None:
    (fresh.path / "ports.json").write_text('{"api": "x"}')
    assert fresh.ports({"api": 0}, wished={})["api"] > 0
