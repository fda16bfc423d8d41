"""Read the files that the embedded stack writes into CELERIAC_HOME: its addresses and secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import unquote, urlsplit

# The embedded servers listen here; PostgreSQL has this role and database.
HOST: Final = "127.0.0.1"
ROLE: Final = "celeriac"
DATABASE: Final = "celeriac"
MARK: Final = "MARK"  # key in stack.json that identifies the folder and the boot of the machine


class SettingsError(Exception):
    """A setting is missing or wrong.

    An environment variable has a value that cannot be used, or a file in CELERIAC_HOME is damaged.
    """

    code: ClassVar[str] = "bad_setting"
    remedy: ClassVar[str] = "Correct the variable that the message names; docs/configuration.md describes all of them."
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    @property
    def message(self) -> str:
        return str(self)


def is_printed(variable: str, url: str, secrets: Mapping[str, str]) -> bool:
    """Return whether `manage.py env` prints this address for a home with these secrets; its port may have changed.

    Another database on the same server is not such an address.
    """
    try:
        address = urlsplit(url)
        found = (address.username or "", unquote(address.password or ""), address.hostname, address.path)
    except ValueError:
        return False
    if variable == "DATABASE_URL":
        ours = (ROLE, secrets.get("postgres"), HOST, f"/{DATABASE}")
        return found == ours and not address.query and address.scheme.partition("+")[0] in ("postgresql", "postgres")
    return found == ("", secrets.get("redis"), HOST, "/0") and not address.query and address.scheme == "redis"


def read_stack(home: Path) -> dict[str, str]:
    """Return the addresses of the stack that runs in this folder; empty for a copy of the folder or after a reboot."""
    found = read_json(home / "stack.json")
    return found if found and found.pop(MARK, None) in (None, mark_of(home)) else {}


def mark_of(home: Path) -> str:
    """Return a mark that differs between a folder, its copies, and the same folder after a reboot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{home.stat().st_ino}@{boot.read_text().strip() if boot.exists() else ''}"


def read_json(path: Path) -> dict[str, str]:
    """Return the content of a JSON file written by `embedded/`; empty if it does not exist."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (ValueError, TypeError):
        raise SettingsError(f"{path} is damaged: stop the stack, delete this file and start the stack again.") from None
