"""Control a stack from outside: start its supervisor in the background, stop it, show its state and addresses."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from child_process import ChildProcess, OwnProcess, StartFailed
from embedded.addresses import address_of, external_servers
from embedded.home import Home
from embedded.roles import ROLES, STOP_ORDER, SUPERVISOR
from embedded.shutdown import PATIENCE_SECONDS, stop_programs
from models.errors import Unreachable
from settings import ROOT, SERVER_VARIABLES, Settings

# Each step of the shutdown may need its whole patience.
DOWN_PATIENCE_SECONDS: Final = (PATIENCE_SECONDS + 5) * len(STOP_ORDER)


@dataclass(frozen=True, slots=True)
class Status:
    """One line of `ps`."""

    role: str
    pid: int | None
    status: str
    uptime_seconds: int | None
    address: str  # host and port, or a URL; never with a password
    login: str  # where its login is kept


def start_detached(settings: Settings, *, verbose: bool) -> bool:
    """Start a supervisor in the background and return when all is ready. Return False if a stack runs already."""
    home = Home(settings.home)
    home.create()
    if not lock_or_find_ready(home):
        return False
    ready_file = home.ready_file(SUPERVISOR)
    ready_file.unlink(missing_ok=True)  # left by a supervisor that was killed
    home.unlock()
    supervisor = ChildProcess(
        SUPERVISOR,
        [sys.executable, str(ROOT / "manage.py"), "up", "--supervise", *(["-v"] if verbose else [])],
        log=home.log_file(SUPERVISOR),
        cwd=ROOT,
    )
    try:
        while not ready_file.exists():
            if (code := supervisor.exit_code()) is not None:
                if code == 0:
                    return False  # another `up` was faster
                kind = Unreachable if code == Unreachable.exit_code else StartFailed
                reason = supervisor.output().removeprefix("manage.py: ")
                raise kind(reason or f"The supervisor ended with code {code} and wrote no reason to its log.")
            time.sleep(0.05)
    except KeyboardInterrupt:
        supervisor.end(2 * DOWN_PATIENCE_SECONDS)
        raise
    return True


def stop(settings: Settings) -> list[str]:
    """Stop the stack of this home, even if its supervisor was killed. Return the roles that were running."""
    home = Home(settings.home)
    if not home.path.exists():
        return []
    ran = [line.role for line in status(settings) if line.pid]
    deadline = time.monotonic() + 2 * DOWN_PATIENCE_SECONDS
    while not home.lock():  # with the lock, no new supervisor can start while we remove pid files
        if time.monotonic() > deadline:
            raise StartFailed(f"Another process holds {home.path / 'lock'} and does not end: stop it, then try again.")
        supervisor = OwnProcess.read(home.pid_file(SUPERVISOR))
        if supervisor and supervisor.is_alive():
            supervisor.send_signal(signal.SIGTERM)
            supervisor.send_signal(signal.SIGCONT)  # it may have been suspended with Ctrl-Z
            supervisor.wait_or_kill(DOWN_PATIENCE_SECONDS)
    try:
        stop_programs(home)
        home.pid_file(SUPERVISOR).unlink(missing_ok=True)
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
    finally:
        home.unlock()
    return ran


def lock_or_find_ready(home: Home) -> bool:
    """Take the lock and return True, or return False if a stack is ready. Wait while another `up` or `down` works."""
    while not home.lock():
        if home.ready_file(SUPERVISOR).exists():
            return False
        time.sleep(0.1)
    return True


def status(settings: Settings) -> list[Status]:
    """Return every program that was started, and whether it runs now."""
    home = Home(settings.home)
    lines = []
    for role in (SUPERVISOR, *ROLES):
        process = OwnProcess.read(home.pid_file(role))
        if process is None:
            continue
        alive = process.is_alive()
        uptime = process.uptime_seconds() if alive else None
        at = address_of(role, settings)
        word = "running" if alive else "stopped"
        lines.append(Status(role, process.pid if alive else None, word, uptime, at.address, at.login))
    return lines


def parts(settings: Settings) -> list[Status]:
    """Return the programs of the stack, and the servers that it uses and did not start; empty if no stack runs."""
    programs = status(settings)
    if not programs:
        return []
    external = external_servers(settings.stack, {line.role for line in programs})
    return [*programs, *(Status(role, None, "external", None, at.address, at.login) for role, at in external.items())]


def exports(settings: Settings) -> dict[str, str]:
    """Return the addresses of the stack, or of the configured servers, and libpq's variables for `psql`."""
    found = {variable: settings.server_url(variable) for variable in SERVER_VARIABLES}
    found["DATABASE_URL"] = settings.database_url  # with the driver, as SQLAlchemy's create_engine needs it
    if api_url := settings.stack.get("API_URL"):
        found["API_URL"] = api_url
    return found | _libpq_variables(settings.database_url)


def _libpq_variables(url: str) -> dict[str, str]:
    address = urlsplit(url)
    values = {
        "PGHOST": address.hostname,
        "PGPORT": str(address.port or ""),
        "PGUSER": address.username,
        "PGPASSWORD": address.password,
        "PGDATABASE": address.path.removeprefix("/"),
    }
    return {name: unquote(value) for name, value in values.items() if value}
