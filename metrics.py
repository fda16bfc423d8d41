"""Every metric of Celeriac once, counted right across the forked children of a worker.

A program with several processes calls `share_between_processes` when it starts, before it forks. From then on its
counters live in files of PROMETHEUS_MULTIPROC_DIR: a folder of its own, removed when the program ends, or the one that
was set from outside. Gauges are not here: they are read from the ledger and the broker at scrape time.
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
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
_OURS: Final = "CELERIAC_METRICS_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def _choose_folder() -> None:
    """Set the folder of this program. A folder that a parent program made for itself is not shared."""
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


def share_between_processes() -> None:
    """Keep the counters in files from now on, so that one scrape sees all processes of this program.

    prometheus_client decides about files when it is first imported, which Flower's plug-in for Celery does before any
    code of ours runs. So the decision is made again here, and the metrics start again from zero.
    """
    _choose_folder()
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()  # type: ignore[no-untyped-call]
    for metric in (value for value in globals().values() if isinstance(value, Counter | Histogram)):
        if metric._labelnames:
            metric.clear()
        else:
            metric._metric_init()


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
    """Return all numbers of this program, its child processes' included, in Prometheus's text format."""
    return generate_latest(_registry())


def serve(port: int) -> tuple[WSGIServer, threading.Thread]:
    """Answer /metrics on loopback from a thread of this process."""
    return start_http_server(port, addr="127.0.0.1", registry=_registry())


def _registry() -> CollectorRegistry:
    if _FOLDER not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
