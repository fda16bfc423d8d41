"""What `celeryconfig.py` says in this environment; it is read anew each time, unlike a module."""

from __future__ import annotations

import runpy
from types import ModuleType
from typing import Any

from settings import ROOT


def celery_settings() -> dict[str, Any]:
    said = runpy.run_path(str(ROOT / "celeryconfig.py"))
    return {name: value for name, value in said.items() if name.islower() and _is_setting(name, value)}


def _is_setting(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
