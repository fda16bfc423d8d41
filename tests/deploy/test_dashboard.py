"""Run every query of the dashboard and every alert rule on a real Prometheus that scrapes the API."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
import yaml
from prometheus_client import REGISTRY
from sqlalchemy.orm import Session

import metrics
import outbox
import settings
from models.engine import engine
from models.sql import sql
from receipts.chat_messages import ChatMessage
from receipts.save import save_any_shard
from tally.counts import count, counts
from tally.subjects import Subject
from tally.totals import read_totals
from tasks import ticks
from tasks.core.registry import handlers
from tasks.recovery.tick_rows import record_tick
from tests.api.server import Server
from tests.compose import running
from tests.deploy.monitoring import CONFIGURATION, DASHBOARD, PROMETHEUS, RULES, TARGETS, program
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import claimed, delivered, submitted
from tests.tasks.registrations import registered
from tests.tasks.web import get

pytestmark = pytest.mark.guarantee
VARIABLES: Final = {
    "RECEIPT_TWO_PHASE_ENABLED": "true",
    "RECEIPT_PROMISE_SECONDS": "0.0001",
    "OUTBOX_DESTINATIONS": json.dumps({"nowhere": "https://127.0.0.1:1/hook?allow_private=1"}),
}
RUNS: Final = "sum(ingest_task_process_seconds_count)"
LAST_TICK: Final = {"tick": "tally", "result": "ok"}  # the last of what `make_traffic` does
TICKS: Final = 'celeriac_ticks_total{tick="tally", result="ok"}'
REPLACED: Final = {"$__rate_interval": "5m", "$queue": ".*", "$type": ".*"}


class Prometheus:
    """A Prometheus that scrapes an API and this process once a second."""

    def __init__(self, port: int) -> None:
        self.port = port

    def is_ready(self) -> bool:
        return get(self.port, "/-/ready")[0] == 200

    def ask(self, path: str) -> Any:
        status, text = get(self.port, path)
        assert status == 200, path
        return json.loads(text)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.ask(f"/api/v1/query?query={quote(expression)}")["result"]
        return result

    def value(self, expression: str) -> float:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0


@pytest.fixture
def installation(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    receiving = Receiving()
    yield receiving
    receiving.close()


@pytest.fixture
def prometheus(installation: Receiving, tmp_path: Path) -> Iterator[Prometheus]:
    """Start it with our configuration and rules; only addresses and intervals are others."""
    executable = program("prometheus")
    for metric in metrics.all_metrics():
        if metric._labelnames:
            metric.clear()  # other tests of this process have counted things that do not happen here
    api = Server()
    api.start()
    own, thread = metrics.serve(0, "127.0.0.1")
    configuration = {**CONFIGURATION, "rule_files": [str(PROMETHEUS / "alerts.yml")]}
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["scrape_configs"] = [
        {"job_name": "celeriac", "static_configs": [{"targets": [f"127.0.0.1:{api.port}"]}]},
        {
            "job_name": "celeriac-programs",
            "static_configs": [{"targets": [f"127.0.0.1:{own.server_port}"], "labels": {"program": "api"}}],
        },
    ]
    assert [job["job_name"] for job in CONFIGURATION["scrape_configs"]] == ["celeriac", "celeriac-programs"]
    del configuration["alerting"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with running([executable, *files, f"--web.listen-address=127.0.0.1:{port}"]):
        made = Prometheus(port)
        wait_until(made.is_ready, "Prometheus is ready")
        yield made
    own.shutdown()
    own.server_close()
    thread.join()
    api.stop()


def test_every_query_of_the_dashboard_and_every_rule_runs_on_a_real_prometheus(
    installation: Receiving, prometheus: Prometheus
) -> None:
    # twice, with a scrape in between, because a rate needs a difference
    for number in (1, 2):
        make_traffic(installation, number)
        await_scrape(prometheus)

    for title, target in TARGETS:
        found = prometheus.query(_filled_in(target["expr"]))
        assert found, f"{title}: no data for {target['expr']}"
        assert all(series["value"][1] != "NaN" for series in found), f"{title}: {found}"
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert any(labels <= series["metric"].keys() for series in found), f"{title}: {labels} in {found}"
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        assert prometheus.ask(f"/api/v1/label/{label}/values?match[]={metric}"), variable["name"]

    wait_until(lambda: set(rules(prometheus).values()) == {"ok"}, "every rule was evaluated without an error")
    assert list(rules(prometheus)) == [rule["alert"] for rule in RULES]


def await_scrape(prometheus: Prometheus) -> None:
    """Wait until Prometheus has the latest numbers of the API and of this process."""
    ticked = REGISTRY.get_sample_value("celeriac_ticks_total", LAST_TICK)
    with engine().connect() as connection:
        runs = sum(sum(total.run) for total in read_totals(connection) if total.subject is Subject.TASK)
    wait_until(lambda: prometheus.value(TICKS) == ticked, "this process was scraped")
    wait_until(lambda: prometheus.value(RUNS) == runs, "the API was scraped")


def rules(prometheus: Prometheus) -> dict[str, str]:
    """Return the health of each rule."""
    groups = prometheus.ask("/api/v1/rules")["groups"]
    order = [rule["alert"] for rule in RULES]
    found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    return {name: found[name] for name in order}


def make_traffic(receiving: Receiving, number: int) -> None:
    """Let something of everything happen that the dashboard shows."""
    registered(handlers())
    done = submitted(3)
    delivered(done)
    delivered(done)  # skipped
    delivered(submitted(1, "test.fail", max_attempts=2))
    delivered(submitted(1, "test.fail", max_attempts=1))
    claimed(submitted(1))  # by a worker that is lost
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.task_lease SET lease_until = claimed_at, is_extended = true"))
        record_tick(connection, "beat", holder="a test")
    with Session(engine()) as session:
        outbox.add(session, "nowhere", {"n": number})
        session.commit()
    for tick in ("relay", "reclaim", "prune"):
        ticks.run(tick)
    receiving.chat(ChatMessage("ann", "bob", str(number), "hello"))
    assert save_any_shard(10, until_idle=True)
    # what takes a broken network or a second server
    count(Subject.LEASE, "lost")
    count(Subject.DEAD_LETTER, "sent")
    metrics.LEASE_RENEWALS_TOTAL.labels("renewed").inc()
    metrics.SINK_RECOVERY_TOTAL.labels("billing", "committed").inc()
    metrics.RECEIPT_ACK_SECONDS.observe(0.01)
    metrics.RECEIPT_FAILURES_TOTAL.labels("deliver").inc()
    counts.append()
    ticks.run("tally")


def _filled_in(expression: str) -> str:
    for name, value in REPLACED.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression
