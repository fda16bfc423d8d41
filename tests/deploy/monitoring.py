"""The files of deploy/ for monitoring, as their tests read them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from typing import Any, Final

import pytest
import yaml

from settings import ROOT

PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
CONFIGURATION: Final[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
RULES: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "deploy" / "grafana" / "celeriac.json").read_text())
TARGETS: Final[list[tuple[str, dict[str, Any]]]] = [
    (panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]
METRICS_PAGE: Final = (ROOT / "docs" / "metrics.md").read_text()


def program(name: str) -> str:
    """Return the path of a program of Debian's package `prometheus`, or skip the test."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


def metrics_in(expressions: Iterable[str]) -> set[str]:
    """Return the names of our metrics in PromQL, without the suffixes of histograms."""
    bare = (re.sub(r'"[^"]*"', "", expression) for expression in expressions)
    names = {name for text in bare for name in re.findall(r"\b(?:celeriac|ingest|outbox)_\w+", text)}
    return {re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for name in names}
