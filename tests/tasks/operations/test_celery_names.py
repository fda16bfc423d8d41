"""METRICS_CELERY_NAMES: the installation's numbers under the names of celery-exporter, for dashboards that exist."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

import settings
from models.engine import engine
from models.sql import sql
from tally.counts import counts
from tasks import ticks
from tasks.operations import installation_metrics
from tasks.operations.scale import report_size
from tests.tasks.deliveries import claimed, delivered, submitted
from tests.tasks.registrations import handler_of, registered

BUSY: Final = "near:17-a"
SILENT: Final = "far:9-gone"
FALL_SILENT: Final = sql("UPDATE ledger.task_worker SET seen_at = seen_at - interval '1 hour' WHERE worker = :worker")
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(installation_metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("celery_"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICS_CELERY_NAMES", "true")
    settings.current.cache_clear()


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


def test_the_variables_of_its_dashboards_find_every_type_and_queue(wanted: None) -> None:
    """The dashboards list what `received`, `sent` and `worker_up` have. What did not run is no attempt."""
    done = submitted(2)
    delivered(done)
    delivered(done)  # skipped
    delivered(submitted(1, run_at=timedelta(hours=1)))  # not due
    delivered(submitted(1, "test.fail", max_attempts=2))
    counts.append()
    expected = [
        ({"name": name, "queue_name": "ingest"}, count) for name, count in (("test.fail", 1), ("test.insert", 2))
    ]
    for name in ("sent", "received", "started"):
        assert scraped()[f"celery_task_{name}_total"] == expected, name


def test_a_worker_is_up_while_it_gives_signs_of_life_and_has_the_tasks_of_all_its_processes(wanted: None) -> None:
    for name in (BUSY, SILENT):  # of a queue that no worker of another test consumes
        registered(handler_of("test.insert"), name=name, consumed=["reports"], ingest_queues=("reports",))
    with engine().begin() as connection:
        connection.execute(FALL_SILENT, {"worker": SILENT})
    report_size(engine(), worker=BUSY, queues=["reports"], processes=4)
    for holder, tasks in (("near:18-a", 3), ("near:19-a", 2), ("near:18-b", 1)):  # the last one is of another worker
        claimed(submitted(tasks), holder=holder, batch_of=lambda _: 10)
    found = scraped()
    for name, busy, silent in (("celery_worker_up", 1, 0), ("celery_worker_tasks_active", 5, 0)):
        shown = {labels["hostname"]: value for labels, value in found[name]}
        assert (shown[BUSY], shown[SILENT]) == (busy, silent), name
    for name, count in (("celery_active_worker_count", 1), ("celery_active_process_count", 4)):
        assert ({"queue_name": "reports"}, count) in found[name]
