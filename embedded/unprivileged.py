"""How to run PostgreSQL, which refuses to be run by root.

An ordinary user just runs it. Root starts it inside a user namespace in which it is user 1000: the files stay root's.
Where user namespaces are forbidden (many containers) it is run as `nobody`, who must be able to walk to its files.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from models.errors import CeleriacError

NAMESPACE: Final = ("unshare", "-U", "--map-user=1000", "--map-group=1000")


class PostgresUnusable(CeleriacError):
    """The embedded PostgreSQL cannot run here."""

    code = "postgres_unusable"


@dataclass(frozen=True, slots=True)
class WayToRun:
    """What goes before a command, and as whom it runs."""

    prefix: tuple[str, ...] = ()
    popen_options: dict[str, Any] = field(default_factory=dict)

    def give(self, path: Path) -> None:
        """Make files the server's own; also those of a run in another way, before a machine changed its mind."""
        if os.geteuid() != 0 or path.stat().st_uid == (uid := self.popen_options.get("user", 0)):
            return
        os.chown(path, uid, -1)
        for file in path.rglob("*"):
            os.chown(file, uid, -1, follow_symlinks=False)

    def make_reachable(self, install: Path, home: Path) -> Path:
        """Where the server can be run from: the install itself, or a copy in the home if `nobody` cannot get there."""
        if not self.popen_options:
            return install
        home.chmod(0o711)  # to walk through, not to look around; the files in it stay closed
        if not self._can_reach(home):
            raise PostgresUnusable(
                f"PostgreSQL refuses to run as root, user namespaces are forbidden here, and {home} is closed to "
                "others: run as an ordinary user, move CELERIAC_HOME, or set DATABASE_URL."
            )
        return install if self._can_reach(install) else _copy(install, home / "install")

    def _can_reach(self, folder: Path) -> bool:
        look = subprocess.run(["ls", "-d", f"{folder}/."], capture_output=True, check=False, **self.popen_options)
        return look.returncode == 0


def choose_way() -> WayToRun:
    if os.geteuid() != 0:
        return WayToRun()
    if user_namespaces_work():
        return WayToRun(prefix=NAMESPACE)
    nobody = pwd.getpwnam("nobody")
    return WayToRun(popen_options={"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []})


@cache
def user_namespaces_work() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _copy(install: Path, target: Path) -> Path:
    """The server and, where its binaries look for them, the libraries that the wheel keeps beside its package."""
    package, libraries = install.parent, install.parent.with_suffix(".libs")
    copy = target / package.name / install.name
    shutil.copytree(install, copy, symlinks=True, dirs_exist_ok=True)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
    return copy
