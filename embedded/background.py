"""The life of a stack from outside: start a supervisor in the background, stop it, look at its parts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from embedded.errors import StartFailed
from embedded.home import Home
from embedded.process import Process
from embedded.roles import RANKS, ROLES, SUPERVISOR
from embedded.stop_parts import PATIENCE_SECONDS, stop_parts
from models.errors import Unreachable
from settings import ROOT, SERVER_VARIABLES, Settings

# a part that hangs costs its rank the whole patience
DOWN_PATIENCE_SECONDS: Final = (PATIENCE_SECONDS + 5) * len(RANKS)


@dataclass(frozen=True, slots=True)
class Status:
    """One line of `ps`."""

    role: str
    pid: int | None
    status: str
    uptime_seconds: int | None


def start_detached(settings: Settings, *, verbose: bool) -> bool:
    """Start a supervisor in a session of its own and return when everything is ready. False if a stack runs already."""
    home = Home(settings.home)
    home.create()
    if not lock_or_find_ready(home):
        return False
    home.ready_file(SUPERVISOR).unlink(missing_ok=True)  # of a supervisor that was killed
    home.unlock()
    log = home.log_file(SUPERVISOR)
    said_before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, str(ROOT / "manage.py"), "up", "--supervise", *(["-v"] if verbose else [])]
    with log.open("ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=ROOT
        )
    try:
        while not home.ready_file(SUPERVISOR).exists():
            if (code := child.poll()) is not None:
                with log.open("rb") as output:
                    output.seek(said_before)
                    reason = output.read().decode(errors="replace").strip().removeprefix("manage.py: ")
                if code == 0:
                    return False  # another `up` was quicker
                kind = Unreachable if code == Unreachable.exit_code else StartFailed
                raise kind(reason or f"The supervisor ended with code {code} and said nothing.")
            time.sleep(0.05)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    return True


def stop(settings: Settings) -> list[str]:
    """Stop the stack of this home, also one whose supervisor was killed. Returns the roles that ran."""
    home = Home(settings.home)
    if not home.path.exists():
        return []
    ran = [line.role for line in status(settings) if line.pid]
    deadline = time.monotonic() + 2 * DOWN_PATIENCE_SECONDS
    while not home.lock():  # only its holder may touch pid files: no supervisor can begin beneath us
        if time.monotonic() > deadline:
            raise StartFailed(f"Somebody holds {home.path / 'lock'} and does not end.")
        supervisor = Process.read(home.pid_file(SUPERVISOR))
        if supervisor and supervisor.is_alive():
            supervisor.ask_to_end(signal.SIGTERM)
            supervisor.ask_to_end(signal.SIGCONT)  # it may have been stopped with Ctrl-Z
            supervisor.wait_or_kill(DOWN_PATIENCE_SECONDS)
    try:
        stop_parts(home)
        home.pid_file(SUPERVISOR).unlink(missing_ok=True)
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
    finally:
        home.unlock()
    return ran


def lock_or_find_ready(home: Home) -> bool:
    """Take the lock; while another `up` starts or a `down` stops, wait for what becomes of it. False: a stack runs."""
    while not home.lock():
        if home.ready_file(SUPERVISOR).exists():
            return False
        time.sleep(0.1)
    return True


def status(settings: Settings) -> list[Status]:
    """Every part that was started, and whether it runs now."""
    home = Home(settings.home)
    lines = []
    for role in (SUPERVISOR, *ROLES):
        process = Process.read(home.pid_file(role))
        if process is None:
            continue
        alive = process.is_alive()
        uptime = process.uptime_seconds() if alive else None
        lines.append(Status(role, process.pid if alive else None, "running" if alive else "stopped", uptime))
    return lines


def exports(settings: Settings) -> dict[str, str]:
    """The addresses of the running stack, and what was given from outside."""
    found = {variable: settings.server_url(variable) for variable in SERVER_VARIABLES}
    if api_url := settings.stack.get("API_URL"):
        found["API_URL"] = api_url
    return found
