"""Whether Python finds this project's modules, and whether the variables that are set mean anything."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from checks.result import Finding, fail, ok, warn
from settings import ROOT, Settings, variables

MODULES: Final = ("settings", "metrics", "failpoint", "celeryconfig", "models", "outbox", "tasks", "api")
PREFIXES: Final = ("INGEST_", "OUTBOX_", "RECEIPT_", "CHECKPOINT_", "BACKLOG_", "CELERIAC_")
INTERNAL: Final = ("CELERIAC_READY_FILE", "CELERIAC_METRICS_DIR")


def check(_settings: Settings) -> Iterator[Finding]:
    yield from _modules()
    yield from _unknown_variables()


def _modules() -> Iterator[Finding]:
    strangers = [f"{name} is {place or 'missing'}" for name in MODULES if not _is_ours(place := find(name))]
    if strangers:
        remedy = f"start from {ROOT}, and look at PYTHONPATH and at installed packages of the same name"
        yield fail("modules", f"not this project's: {'; '.join(strangers)}", remedy)
    else:
        yield ok("modules", f"all from {ROOT}")


def find(name: str) -> str | None:
    """Where Python would find a module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or []), None)


def _is_ours(place: str | None) -> bool:
    return place is not None and Path(place).resolve().is_relative_to(ROOT)


def _unknown_variables() -> Iterator[Finding]:
    known = {name for field in Settings.model_fields for name in variables(field)}
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and name not in known and name not in INTERNAL:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "remove it, or see docs/configuration.md"
            yield warn("variables", f"{name} is set and means nothing", remedy)
