"""A user who runs the whole stack with `manage.py up`. The test files that need it share one, in one test process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from child_process import OwnProcess
from embedded.home import Home
from embedded.roles import PORTS
from settings import ROOT
from tests.tasks.celery_settings import application


class User:
    """Runs commands in one home.

    Its ports are its own: a stack of another test process could otherwise take a default port while this one is down.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        first = 20_000 + 20 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        own = Home(home)
        own.create()
        own.ports({role: first + place for place, role in enumerate(PORTS)}, wished={})
        # many shells set these for other servers
        others = {"http_proxy": "http://127.0.0.1:9", "PGSSLMODE": "require"}
        self.environment = dict(os.environ) | others | {"CELERIAC_HOME": str(home), "LOG_FORMAT": "json"}

    def manage(self, *arguments: str, code: int = 0, variables: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env=self.environment | (variables or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def pids(self) -> dict[str, int]:
        """Return what `manage.py ps` prints, without the second that starting it takes."""
        files = (self.home / "run").glob("*.pid")
        return {path.stem: int(path.read_text().split()[0]) for path in files}

    def addresses(self) -> dict[str, str]:
        return dict(json.loads((self.home / "stack.json").read_text()))

    def exports(self) -> dict[str, str]:
        lines = self.manage("env").splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def workers(self) -> set[str]:
        """Return the first half of the names of the workers that answer a ping."""
        with application(self.addresses()["BROKER_URL"]) as app:
            answers = app.control.ping(timeout=1, limit=2) or []
        return {name.partition("@")[0] for answer in answers for name in answer}

    def processes(self) -> list[OwnProcess]:
        """Return every process whose environment names this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CELERIAC_HOME") == str(self.home) and process.pid != os.getpid():
                    found.append(OwnProcess.of(process.pid))
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    folder = Path(tempfile.mkdtemp(prefix="celeriac up "))
    made = User(folder / "home")
    yield made
    made.manage("down")
    shutil.rmtree(folder)


@pytest.fixture
def running(user: User) -> User:
    """A user whose stack is running; it is started unless an earlier test has."""
    if not (user.home / "run" / "supervisor.ready").exists():
        user.manage("up", "-d")
    return user
