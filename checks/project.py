"""Checks the project: does Python import our modules, and are all environment variables known?"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from checks.result import Finding, fail, ok, warn
from settings import ROOT, Settings, variables

MODULES: Final = (
    "settings",
    "metrics",
    "failpoint",
    "child_process",
    "celeryconfig",
    "models",
    "outbox",
    "tasks",
    "documents",
    "workflows",
    "api",
)
PREFIXES: Final = ("INGEST_", "OUTBOX_", "RECEIPT_", "CHECKPOINT_", "BACKLOG_", "LEDGER_", "CELERIAC_")
INTERNAL: Final = ("CELERIAC_READY_FILE", "CELERIAC_METRICS_DIR")


def check(_settings: Settings) -> Iterator[Finding]:
    yield _check_modules()
    yield from _find_unknown_variables()


def _check_modules() -> Finding:
    foreign = [f"{name} is {path or 'missing'}" for name in MODULES if not _is_ours(path := find_module(name))]
    if foreign:
        remedy = f"start from {ROOT}, and look at PYTHONPATH and at installed packages with the same names"
        return fail("modules", f"not imported from this project: {'; '.join(foreign)}", remedy)
    return ok("modules", f"all imported from {ROOT}")


def find_module(name: str) -> str | None:
    """Return the path from which Python would import a module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or []), None)


def _is_ours(path: str | None) -> bool:
    return path is not None and Path(path).resolve().is_relative_to(ROOT)


def _find_unknown_variables() -> Iterator[Finding]:
    known = {name for field in Settings.model_fields for name in variables(field)}
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and name not in known and name not in INTERNAL:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "remove it, or see docs/configuration.md"
            yield warn("variables", f"{name} is set but unknown", remedy)
