"""The alert rules: promtool runs their examples, and each has an entry in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from settings import ROOT
from tests.deploy.monitoring import CONFIGURATION, METRICS_PAGE, PROMETHEUS, RULES, TARGETS, metrics_in, program

EXAMPLES: Final = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
RUNBOOK: Final = (ROOT / "docs" / "operations.md").read_text()
ALERTMANAGER: Final[dict[str, Any]] = yaml.safe_load(
    (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
)
NAMES: Final = [rule["alert"] for rule in RULES]


@pytest.mark.guarantee
@pytest.mark.parametrize("arguments", ["check config --lint-fatal prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_accepts_the_configuration_and_every_example_of_the_rules(arguments: str) -> None:
    command = [program("promtool"), *arguments.split()]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantee
def test_promtool_accepts_the_configuration_of_the_page_for_a_local_stack(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(# started with .*?)^```", RUNBOOK, re.MULTILINE | re.DOTALL)
    jobs = [job["job_name"] for job in yaml.safe_load(block)["scrape_configs"]]
    assert jobs == [job["job_name"] for job in CONFIGURATION["scrape_configs"]]
    (tmp_path / "prometheus.yml").write_text(block)
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_an_example_that_raises_it_and_one_that_does_not() -> None:
    examples = [(test["alertname"], bool(test["exp_alerts"])) for each in EXAMPLES for test in each["alert_rule_test"]]
    assert set(examples) == {(name, is_raised) for name in NAMES for is_raised in (True, False)}


def test_every_alert_has_a_severity_a_sentence_and_an_entry_in_the_runbook() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert re.fullmatch(r"[A-Z{][^.]*(\.\w[^.]*)*\.", rule["annotations"]["summary"]), rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_the_runbook_explains_every_alert_and_no_other() -> None:
    chapter = re.search(r"^## Alerts\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert chapter
    entries = re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", chapter[1], re.MULTILINE | re.DOTALL)
    assert [name for name, _ in entries] == NAMES
    assert [name for name, text in entries if not re.search(r"`[^`]*(manage\.py|docker compose) [^`]+`", text)] == []


def test_rules_and_dashboard_use_documented_metrics_only() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", METRICS_PAGE, re.MULTILINE))
    expressions = [rule["expr"] for rule in RULES] + [target["expr"] for _, target in TARGETS]
    assert metrics_in(expressions) - documented == set()


def test_the_dashboard_shows_every_documented_metric() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", METRICS_PAGE, re.MULTILINE))
    assert documented - metrics_in(target["expr"] for _, target in TARGETS) == set()


def test_the_example_for_alertmanager_names_existing_receivers_severities_and_alerts() -> None:
    route = ALERTMANAGER["route"]
    used = {route["receiver"], *(each["receiver"] for each in route["routes"])}
    assert used == {receiver["name"] for receiver in ALERTMANAGER["receivers"]}
    severities = {rule["labels"]["severity"] for rule in RULES}
    assert {_value(matcher) for each in route["routes"] for matcher in each["matchers"]} <= severities
    for rule in ALERTMANAGER["inhibit_rules"]:
        (source,), (targets,) = rule["source_matchers"], rule["target_matchers"]
        assert _value(source) in NAMES
        prefix, alternatives = re.fullmatch(r"(\w+)\((.+)\)", _value(targets)).groups()  # type: ignore[union-attr]
        assert {prefix + name for name in alternatives.split("|")} <= set(NAMES)


def _value(matcher: str) -> str:
    found = re.fullmatch(r'\w+ =~? "(.+)"', matcher)
    assert found, matcher
    return found[1]
