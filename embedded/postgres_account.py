"""The account that runs PostgreSQL, which refuses to run as root.

An ordinary user runs it directly. Root starts it in a user namespace where it is user 1000; the files stay root's.
Where user namespaces are forbidden, as in many containers, it runs as UNPRIVILEGED_USER, who must be able to reach
its files.
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

UNPRIVILEGED_USER: Final = "nobody"
NAMESPACE: Final = ("unshare", "-U", "--map-user=1000", "--map-group=1000")


class PostgresUnusable(CeleriacError):
    """The embedded PostgreSQL cannot run here.

    There is no server for this platform, its data belongs to another version, or root may not run it in this place.
    """

    code = "postgres_unusable"
    remedy = "Do what the message says, or set DATABASE_URL to a PostgreSQL of your own."


@dataclass(frozen=True, slots=True)
class PostgresAccount:
    """What goes before a command, and the user that runs it."""

    prefix: tuple[str, ...] = ()
    popen_options: dict[str, Any] = field(default_factory=dict)

    def give(self, path: Path) -> None:
        """Make the account the owner of these files; an earlier run may have used another account."""
        if os.geteuid() != 0 or path.stat().st_uid == (uid := self.popen_options.get("user", 0)):
            return
        os.chown(path, uid, -1)
        for file in path.rglob("*"):
            os.chown(file, uid, -1, follow_symlinks=False)

    def make_reachable(self, install: Path, home: Path) -> Path:
        """Return the folder to run the server from: `install`, or a copy if the account cannot read it."""
        if not self.popen_options:
            return install
        home.chmod(0o711)  # others may pass through but not list it; the files in it stay private
        if not self._can_reach(home):
            raise PostgresUnusable(
                f"PostgreSQL refuses to run as root, user namespaces are forbidden here, and other users cannot reach "
                f"{home}: run as an ordinary user, move CELERIAC_HOME, or set DATABASE_URL."
            )
        return install if self._can_reach(install) else _copy(install, home / "install")

    def _can_reach(self, folder: Path) -> bool:
        look = subprocess.run(["ls", "-d", f"{folder}/."], capture_output=True, check=False, **self.popen_options)
        return look.returncode == 0


def choose_account() -> PostgresAccount:
    if os.geteuid() != 0:
        return PostgresAccount()
    if user_namespaces_work():
        return PostgresAccount(prefix=NAMESPACE)
    user = pwd.getpwnam(UNPRIVILEGED_USER)
    return PostgresAccount(popen_options={"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []})


@cache
def user_namespaces_work() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _copy(install: Path, target: Path) -> Path:
    """Copy the server, and the libraries that the package keeps beside it to where the binaries expect them."""
    package, libraries = install.parent, install.parent.with_suffix(".libs")
    copy = target / package.name / install.name
    shutil.copytree(install, copy, symlinks=True, dirs_exist_ok=True)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
    return copy
