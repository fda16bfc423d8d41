"""The small files of a home: what `embedded/` writes there, and `settings.py` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Final

MARK: Final = "MARK"  # the key in stack.json that says which folder and boot it belongs to


class SettingsError(Exception):
    """A setting is missing or wrong. Carries the same attributes as `models.errors.CeleriacError`."""

    code: ClassVar[str] = "bad_setting"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    @property
    def message(self) -> str:
        return str(self)


def read_stack(home: Path) -> dict[str, str]:
    """The addresses of the stack that runs in this folder. A copy of the folder has none, nor after a reboot."""
    found = read_json(home / "stack.json")
    return found if found and found.pop(MARK, None) in (None, mark_of(home)) else {}


def mark_of(home: Path) -> str:
    """What tells a running stack's folder from its copies and from itself before the machine was started again."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{home.stat().st_ino}@{boot.read_text().strip() if boot.exists() else ''}"


def read_json(path: Path) -> dict[str, str]:
    """A small file of names and values that `embedded/` wrote; empty if it is not there."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (ValueError, TypeError):
        raise SettingsError(f"{path} is damaged: stop the stack, remove this file and start again.") from None
