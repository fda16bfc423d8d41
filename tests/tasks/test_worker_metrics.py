"""One scrape counts the work of all children of a worker, although Flower's plug-in imports prometheus_client first."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.nodes.containers import WorkerNode
from tests.servers import wait_until
from tests.tasks.web import get

pytestmark = pytest.mark.parametrize("celery_broker", ["celery_redis_broker"], indirect=True)
BATCH = 10


def test_every_tick_is_counted_once_in_whichever_child_it_ran(celery_setup: Any) -> None:
    worker = celery_setup.worker.container
    children = {child.pid for child in psutil.Process(worker.process.pid).children()}
    assert len(children) == 2
    before, sent = counted(worker), 0
    while not children <= counting(worker):
        assert sent < 100 * BATCH, "one child never got a tick"
        for _ in range(BATCH):
            celery_setup.app.send_task("tasks.beat_seen")
        sent += BATCH
        await_counted(worker, before + sent)
    assert counted(worker) == before + sent


def await_counted(worker: WorkerNode, number: float) -> None:
    wait_until(lambda: counted(worker) >= number, f"{number:g} ticks are counted")


def counted(worker: WorkerNode) -> float:
    _, text = get(worker.process.environment["WORKER_METRICS_PORT"], "/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "celeriac_ticks_total" and sample.labels == {"tick": "beat", "result": "ok"}
    )


def counting(worker: WorkerNode) -> set[int]:
    """Return the pids of the processes that have counted anything."""
    return {int(path.stem.removeprefix("counter_")) for path in worker.temporary.glob("*/counter_*.db")}
