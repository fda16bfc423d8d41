"""Known traffic through real workers, and every figure that a scrape of the API shows about it."""

from __future__ import annotations

import json
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
from tally.counts import counts
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


def value(name: str, **labels: str) -> float:
    return scraped().get((name, tuple(sorted(labels.items()))), 0.0)


def results(name: str = "ingest_task_process_total", label: str = "result") -> dict[str, float]:
    found: dict[str, float] = {}
    for (metric, labels), number in scraped().items():
        if metric == name:
            result = dict(labels)[label]
            found[result] = found.get(result, 0) + number
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
    wait_until(lambda: results().get("not_due") == 1 and results().get("skipped", 0) >= 1, "both were counted")
    found = results()
    assert (found["succeeded"], found["retry"], found["dead"], found["discarded"]) == (7, 3, 2, 1)
    assert value("ingest_task_process_total", result="dead", queue="ingest", type=FLAKY) == 2

    # a lost worker: reclaim decides a retry
    assert value("celeriac_queue_workers", queue="ingest") == 1
    worker.popen.terminate()
    worker.popen.wait(20)
    lose_a_worker()
    ticks.run("reclaim")
    counts.append()
    found = results()
    assert (found["retry"], found["succeeded"]) == (4, 7)
    assert results("ingest_stream_reclaim_total") == {"claimed": 1}
    assert value("celeriac_lease_expired_total") == 1

    # the outbox: an event that cannot be published
    with Session(engine()) as db:
        outbox.add(db, "nowhere", {"n": 1})
        db.commit()
    ticks.run("relay")
    counts.append()
    assert value("outbox_publish_total", result="failure", destination="nowhere") == 1
    sent = rows_of("SELECT count(*) FROM ledger.outbox_event WHERE status = 'SENT'")
    assert results("outbox_publish_total")["success"] == sent
    assert value("celeriac_outbox_flush_total", code="outbox_flush_success") == sent

    # dead letters: written once, and once more by a sync, which is not counted
    assert value("ingest_task_dlq_total") == 2
    dead_letter_queue.sync(engine(), site, force=True)
    ticks.run("relay")
    counts.append()
    assert value("ingest_task_dlq_total") == 2
    assert value("ingest_stream_length", stream="ingest.dlq") == 2

    # histograms follow with the tick
    ticks.run("tally")
    assert value("ingest_task_process_seconds_count", result="succeeded", queue="ingest", type=FLAKY) == 7
    assert value("ingest_task_process_seconds_bucket", result="succeeded", queue="ingest", type=FLAKY, le="+Inf") == 7
    assert value("celeriac_task_wait_seconds_count", queue="ingest", type=FLAKY) == 7 + 3 + 2 + 1
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
    assert results() == results(), "the same numbers each time"


def rows_of(statement: str) -> int:
    with engine().connect() as connection:
        return int(connection.execute(sql(statement)).scalar_one())


def lose_a_worker() -> None:
    """Leave a task behind as a worker does that is killed."""
    (id_,) = submitted({})
    with engine().begin() as connection:
        claim(connection, [id_], handlers=handlers(), holder="gone", lease_seconds=1)
        connection.execute(sql("UPDATE ledger.task_lease SET lease_until = claimed_at, is_extended = true"))
