"""The folder of a stack, `CELERIAC_HOME`: everything that the embedded stack writes to disk.

lock            locked by the supervisor while it lives; the only proof that a stack runs
secrets.json    generated passwords, created once
ports.json      the ports of the last run, used again if they are free
stack.json      the addresses of the running stack; absent while nothing runs
run/            pid files        log/        one file per program
postgres/ redis-broker/ redis-receipts/      data and configuration of the servers
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from home_files import MARK, mark_of, read_json, read_stack
from models.errors import CeleriacError

SECRET_NAMES: Final = ("postgres", "postgres_superuser", "redis", "flower")


class HomeUnusable(CeleriacError):
    """The folder of the stack cannot be used.

    CELERIAC_HOME cannot be created or written to, or it contains files that are not Celeriac's.
    """

    code = "home_unusable"
    remedy = "Set CELERIAC_HOME to a new or empty folder that you may write to."


class Home:
    """One `CELERIAC_HOME`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self._lock: int | None = None

    def create(self) -> None:
        """Create the folder, its subfolders and its secrets, readable by their owner only."""
        try:
            self._refuse_foreign_folder()
            for folder in (self.path, self.path / "run", self.log):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
            known = self.secrets
            if missing := [name for name in SECRET_NAMES if name not in known]:
                self._write("secrets.json", known | {name: secrets.token_urlsafe(24) for name in missing})
        except OSError as error:
            raise HomeUnusable(f"{self.path} cannot be used: {error.strerror or error}.") from None

    def _refuse_foreign_folder(self) -> None:
        """Raise HomeUnusable if the folder has other contents: we would change its mode and start servers in it."""
        ours = {"secrets.json", "receipt-keys"}  # keys may be created before the first start
        found = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if found - ours and "secrets.json" not in found:
            raise HomeUnusable(f"{self.path} contains other files: set CELERIAC_HOME to a folder of its own.")

    def lock(self) -> bool:
        """Try to become the supervisor of this home. The kernel releases the lock when the process ends."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for _ in range(5):  # another process may be trying the lock at this moment
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                self._lock = descriptor
                return True
        os.close(descriptor)
        return False

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def secrets(self) -> dict[str, str]:
        return read_json(self.path / "secrets.json")

    @property
    def stack(self) -> dict[str, str]:
        return read_stack(self.path)

    def write_stack(self, addresses: Mapping[str, str]) -> None:
        self._write("stack.json", {**addresses, MARK: mark_of(self.path)})

    def forget_stack(self) -> None:
        (self.path / "stack.json").unlink(missing_ok=True)

    def ports(self, defaults: Mapping[str, int], *, wished: Mapping[str, int]) -> dict[str, int]:
        """Return a free port for each role: the wished one, else that of the last run, else the default, else any."""
        remembered = read_json(self.path / "ports.json")
        chosen: dict[str, int] = {}
        for role, default in defaults.items():
            before = str(remembered.get(role, ""))
            candidates = (wished.get(role, 0), int(before) if before.isdecimal() else 0, default)
            taken = set(chosen.values())
            free = (port for port in candidates if port and port not in taken and _is_free(port))
            chosen[role] = next(free, 0) or _any_free_port(taken)
        self._write("ports.json", remembered | {role: str(port) for role, port in chosen.items()})
        return chosen

    def pid_file(self, role: str) -> Path:
        return self.path / "run" / f"{role}.pid"

    def ready_file(self, role: str) -> Path:
        return self.path / "run" / f"{role}.ready"

    def hold(self, role: str, seconds: float) -> None:
        """Let the supervisor not restart a program that ends, for this time at most (`manage.py drill`)."""
        self._held_file(role).write_text(str(time.time() + seconds))

    def release(self, role: str) -> None:
        self._held_file(role).unlink(missing_ok=True)

    def is_held(self, role: str) -> bool:
        try:
            return time.time() < float(self._held_file(role).read_text())
        except (FileNotFoundError, ValueError):
            return False

    def _held_file(self, role: str) -> Path:
        return self.path / "run" / f"{role}.held"

    def log_file(self, role: str) -> Path:
        return self.log / f"{role}.log"

    def _write(self, name: str, values: Mapping[str, str]) -> None:
        """Replace a file atomically."""
        beside = self.path / f".{name}.{os.getpid()}"
        beside.touch(mode=0o600)
        with beside.open("w") as file:
            json.dump(dict(values), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path / name)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _any_free_port(taken: set[int]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
