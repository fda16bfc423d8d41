"""Every metric of Celeriac once, counted right across the forked children of a worker.

prometheus_client keeps its numbers in files of PROMETHEUS_MULTIPROC_DIR when that is set before it is first imported.
Flower's plug-in imports it before any code of ours runs, so the choice is made again here, before the first metric is.
Each program (a worker with its children, the API) has a folder of its own, which goes away with it; one that was set
from outside is used as it is. Gauges are not here: they are read from the ledger and the broker at scrape time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from wsgiref.simple_server import WSGIServer

import prometheus_client.values
import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
_OURS: Final = "CELERIAC_METRICS_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def _choose_folder() -> None:
    """A folder that an outer program of ours made for itself is inherited through the environment, but not shared."""
    if os.environ.get(_FOLDER) not in (None, os.environ.get(_OURS)):
        return
    ours = f"celeriac-metrics-{os.getuid()}-"
    _sweep(ours)
    folder = tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}-")
    os.environ[_FOLDER] = os.environ[_OURS] = folder
    atexit.register(_remove, folder, os.getpid())


def _sweep(prefix: str) -> None:
    """Folders whose program was killed before it could remove them, or became us by exec: a worker does, on SIGHUP."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


_choose_folder()
prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()  # type: ignore[no-untyped-call]

TICK_TOTAL: Final = Counter("tick_total", "Ticks of beat that were run", ["tick", "result"])

OUTBOX_PUBLISH_TOTAL: Final = Counter("outbox_publish_total", "Events, by how their publish went", ["result"])
OUTBOX_PUBLISH_SECONDS: Final = Histogram("outbox_publish_seconds", "Wait for the confirm of a batch", ["result"])
OUTBOX_PUBLISH_DELAY_SECONDS: Final = Histogram(
    "outbox_publish_delay_seconds",
    "From the later of creation and due time until the publish was confirmed",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600),
)
OUTBOX_FLUSH_TOTAL: Final = Counter("outbox_flush_total", "Attempts, by the code of their outcome", ["code"])

INGEST_TASK_PROCESS_TOTAL: Final = Counter(
    "ingest_task_process_total", "Deliveries, by what became of them", ["result"]
)
INGEST_TASK_PROCESS_SECONDS: Final = Histogram(
    "ingest_task_process_seconds", "Time in the handler, by what became of the task", ["result"]
)
INGEST_TASK_DLQ_TOTAL: Final = Counter("ingest_task_dlq_total", "Dead letters that were published")
INGEST_STREAM_RECLAIM_TOTAL: Final = Counter("ingest_stream_reclaim_total", "Tasks of lost workers", ["result"])
LEASE_LOST_TOTAL: Final = Counter("lease_lost_total", "Tasks whose holder was refused because its lease was lost")
LEASE_EXPIRED_TOTAL: Final = Counter("lease_expired_total", "Leases that ran out and were taken over")


def observe_many(histogram: Histogram, values: Iterable[float]) -> None:
    """As `observe` for each, with a few writes to the counters' file instead of two for each."""
    values = sorted(values)
    histogram._sum.inc(sum(values))
    below = 0
    for bound, bucket in zip(histogram._upper_bounds, histogram._buckets, strict=True):
        up_to = bisect_right(values, bound)
        if up_to > below:
            bucket.inc(up_to - below)
        below = up_to


def exposition() -> bytes:
    """All numbers of this program, its children's included, as Prometheus reads them."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def serve(port: int) -> tuple[WSGIServer, threading.Thread]:
    """Answer /metrics on loopback from a thread of this process."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return start_http_server(port, addr="127.0.0.1", registry=registry)
