"""Known traffic through real workers, and every figure that a scrape of the API shows about it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

import outbox
import settings
from chaos.programs import start_worker
from child_process import ChildProcess
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tally.counts import count, counts
from tally.subjects import Subject
from tasks import NewTask, submit_many, ticks
from tasks.celery import app
from tasks.core.registry import handlers
from tasks.execution.claim import claim
from tasks.operations import dead_letter_queue, installation_metrics
from tests.servers import wait_until
from tests.tasks.own_servers import own_servers
from tests.tasks.work import rows

FLAKY = "demo.flaky"
NOWHERE = "https://127.0.0.1:1/hook?allow_private=1"
VARIABLES = {
    "INGEST_RETRY_BASE_BACKOFF_MS": "0",
    "OUTBOX_DESTINATIONS": json.dumps({"nowhere": NOWHERE}),
    "WORKER_RUN_TICKS": "false",
}


@pytest.fixture(scope="module")
def site() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, sql("SELECT")) as current:
        yield current


@pytest.fixture
def worker(site: settings.Settings, tmp_path: Path) -> Iterator[ChildProcess]:
    program = start_worker(tmp_path, "worker")
    program.await_ready()
    yield program
    program.kill()


def submitted(*payloads: dict[str, Any], **how: Any) -> list[uuid.UUID]:
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, [NewTask(FLAKY, payload, **how) for payload in payloads])]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def finished(count: int) -> None:
    def done() -> bool:
        ticks.run("relay")
        return len(rows("id", where="status IN ('SUCCEEDED', 'DEAD', 'DISCARDED')")) == count

    wait_until(done, f"{count} tasks are finished", seconds=30)


def scraped() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(installation_metrics.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(name: str, /, **labels: str) -> float:
    return scraped().get((name, tuple(sorted(labels.items()))), 0.0)


def results(name: str = "ingest_task_process_total", label: str = "result") -> dict[str, float]:
    found: dict[str, float] = {}
    for (metric, labels), number in scraped().items():
        if metric == name:
            result = dict(labels)[label]
            found[result] = found.get(result, 0) + number
    return found


def skipped(**kind: str) -> float:
    return value("ingest_task_process_total", result="skipped", **kind)


def counters() -> list[str]:
    """Return the lines with counters and histograms. Gauges may change between two scrapes."""
    return counters_in(installation_metrics.exposition().decode())


def counters_of_another_process() -> list[str]:
    program = "from tasks.operations.installation_metrics import exposition; print(exposition().decode())"
    return counters_in(subprocess.check_output([sys.executable, "-c", program], cwd=settings.ROOT, text=True))


def counters_in(text: str) -> list[str]:
    found = [line for line in text.splitlines() if line.partition("{")[0].endswith(("_total", "_bucket", "_sum"))]
    assert found
    return found


def deliver_again(id_: uuid.UUID) -> None:
    app.send_task("tasks.ingest", args=([str(id_)],), queue="ingest")


def test_every_figure_of_known_traffic_is_shown(site: settings.Settings, worker: ChildProcess) -> None:
    done = submitted(*[{}] * 5)  # 5 succeeded
    submitted({"fail": 1}, {"fail": 2})  # 3 retry, 2 succeeded
    submitted({"permanent": "no"}, {"fail": 9}, max_attempts=1)  # 2 dead
    submitted({"discard": "not needed"})  # 1 discarded
    finished(10)
    (later,) = submitted({}, run_at=timedelta(hours=1))
    deliver_again(done[0])  # 1 skipped
    deliver_again(later)  # 1 not due
    for _ in range(3):
        deliver_again(uuid.uuid4())  # skipped: no such task
    wait_until(lambda: results().get("not_due") == 1 and skipped(type="", queue="") == 3, "they were counted")
    # More are skipped if a wake-up names a task that was in the batch of another one.
    wait_until(lambda: skipped(type=FLAKY, queue="ingest") >= 1, "the task that was done is counted with its type")
    found = results()
    assert (found["succeeded"], found["retry"], found["dead"], found["discarded"]) == (7, 3, 2, 1)
    assert value("ingest_task_process_total", result="dead", queue="ingest", type=FLAKY) == 2

    # lost workers: reclaim decides a retry and a death
    assert value("celeriac_queue_workers", queue="ingest") == 1
    worker.popen.terminate()
    worker.popen.wait(20)
    lose_a_worker()
    lose_a_worker(max_attempts=1)
    ticks.run("reclaim")
    counts.append()
    found = results()
    assert (found["retry"], found["dead"], found["succeeded"]) == (4, 3, 7)
    assert results("ingest_stream_reclaim_total") == {"claimed": 2}
    assert value("celeriac_lease_expired_total") == 2

    # the outbox: an event that cannot be published now, and one that never can
    with Session(engine()) as db:
        outbox.add(db, "nowhere", {"n": 1})
        db.execute(sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('unknown', '1')"))
        db.commit()
    ticks.run("relay")
    counts.append()
    assert value("outbox_publish_total", result="failure", destination="nowhere") == 1
    assert value("outbox_publish_total", result="dead", destination="unknown") == 1
    sent = rows_of("SELECT count(*) FROM ledger.outbox_event WHERE status = 'SENT'")
    assert results("outbox_publish_total")["success"] == sent
    assert value("celeriac_outbox_flush_total", code="outbox_flush_success") == sent

    # dead letters: written once, and once more by a sync, which is not counted
    assert value("ingest_task_dlq_total") == 3
    dead_letter_queue.sync(engine(), site, force=True)
    ticks.run("relay")
    counts.append()
    assert value("ingest_task_dlq_total") == 3
    assert value("ingest_stream_length", stream="ingest.dlq") == 3

    # histograms follow with the tick
    ticks.run("tally")
    assert value("ingest_task_process_seconds_count", result="succeeded", queue="ingest", type=FLAKY) == 7
    assert value("ingest_task_process_seconds_bucket", result="succeeded", queue="ingest", type=FLAKY, le="+Inf") == 7
    assert value("celeriac_task_wait_seconds_count", queue="ingest", type=FLAKY) == 7 + 3 + 2 + 1
    assert value("outbox_publish_seconds_count", result="failure") == 1
    assert value("outbox_publish_seconds_count", result="success") > 0
    assert value("outbox_publish_delay_seconds_count") == value(
        "celeriac_outbox_flush_total", code="outbox_flush_success"
    )

    # gauges
    assert value("outbox_backlog") == rows_of(
        "SELECT count(*) FROM ledger.outbox_event WHERE status IN ('NEW', 'RETRYING')"
    )
    assert value("celeriac_outbox_scheduled") >= 1
    assert value("ingest_stream_pending", stream="ingest", group="ingest-workers") == 0
    assert value("celeriac_ledger_unreachable") == value("celeriac_broker_unreachable") == 0
    assert value("celeriac_tick_last_seconds", tick="tally") >= 0
    assert counters() == counters_of_another_process(), "the same numbers from each process"


def test_the_names_of_celery_exporter_show_the_same_numbers_and_are_off_by_default(
    site: settings.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [name for name, _ in scraped() if name.startswith("celery_")]
    monkeypatch.setenv("METRICS_CELERY_NAMES", "true")
    settings.current.cache_clear()
    counted = {"succeeded": 2, "dead": 3, "retry": 4, "discarded": 5}
    for result, number in counted.items():
        count(Subject.TASK, result, number, queue="bulk", type="shop.order", runs=[0.5] * number)
    counts.append()
    ticks.run("tally")
    app.send_task("tasks.ingest", args=([],), queue="ingest")
    of_type = {"name": "shop.order", "queue_name": "bulk"}
    names = ("celery_task_succeeded", "celery_task_failed", "celery_task_retried", "celery_task_revoked")
    assert [value(f"{name}_total", **of_type) for name in names] == [2, 3, 4, 5]
    assert value("celery_task_runtime_count", **of_type) == sum(counted.values())
    assert value("celery_queue_length", queue_name="ingest") == value("ingest_stream_length", stream="ingest") >= 1


def rows_of(statement: str) -> int:
    with engine().connect() as connection:
        return int(connection.execute(sql(statement)).scalar_one())


def lose_a_worker(**how: Any) -> None:
    """Leave a task behind as a worker does that is killed."""
    (id_,) = submitted({}, **how)
    with engine().begin() as connection:
        claim(connection, [id_], handlers=handlers(), holder="gone", lease_seconds=1)
        connection.execute(sql("UPDATE ledger.task_lease SET lease_until = claimed_at, is_extended = true"))
