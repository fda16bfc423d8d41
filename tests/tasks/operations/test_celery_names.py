"""METRICS_CELERY_NAMES: the installation's numbers under the names of celery-exporter, for dashboards that exist."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import settings
from tasks import ticks
from tasks.operations import installation_metrics
from tests.tasks.deliveries import delivered, submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(installation_metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("celery_"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_names_of_celery_exporter_are_shown_if_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered(submitted(3))
    delivered(submitted(1, "test.fail", max_attempts=2))
    delivered(submitted(1, "test.fail", max_attempts=1))
    ticks.run("tally")
    assert scraped() == {}
    monkeypatch.setenv("METRICS_CELERY_NAMES", "true")
    settings.current.cache_clear()
    found: dict[str, Any] = scraped()
    inserted, failed = ({"name": name, "queue_name": "ingest"} for name in ("test.insert", "test.fail"))
    assert found["celery_task_succeeded_total"] == [(inserted, 3)]
    assert found["celery_task_retried_total"] == [(failed, 1)]
    assert found["celery_task_failed_total"] == [(failed, 1)]
    assert (inserted, 3) in found["celery_task_runtime_count"]
    assert "ingest" in {labels["queue_name"] for labels, _ in found["celery_queue_length"]}
