"""The metrics of one program: counters and histograms that are correct across the forked child processes of a worker.

They are served on METRICS_HOST. What concerns the whole installation is counted in the ledger, and /metrics of the API
shows it (`tasks/operations/installation_metrics.py`). No name is in both.

A program with several processes calls `share_between_processes` when it starts, before it forks. From then on its
counters are files in PROMETHEUS_MULTIPROC_DIR: a folder of its own that is removed at exit, unless the variable was set
by the operator.
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
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
_OURS: Final = "CELERIAC_METRICS_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def _choose_folder() -> None:
    """Create a folder for this program, unless the operator set one. A parent program's own folder is not shared."""
    if os.environ.get(_FOLDER) not in (None, os.environ.get(_OURS)):
        return
    ours = f"celeriac-metrics-{os.getuid()}-"
    _remove_abandoned(ours)
    folder = tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}-")
    os.environ[_FOLDER] = os.environ[_OURS] = folder
    atexit.register(_remove, folder, os.getpid())


def _remove_abandoned(prefix: str) -> None:
    """Remove folders whose program was killed, or replaced itself by exec as a worker does on SIGHUP."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


TICKS_TOTAL: Final = Counter("celeriac_ticks_total", "Ticks that this program ran, by result", ["tick", "result"])
CLAIMS_TOTAL: Final = Counter(
    "celeriac_process_claims_total",
    "Tasks that were delivered to this program, by the verdict of the claim",
    ["verdict"],
)
LEASE_RENEWALS_TOTAL: Final = Counter(
    "celeriac_process_lease_renewals_total", "Heartbeats: leases that this program renewed or found lost", ["result"]
)
LOOP_BLOCKED_TOTAL: Final = Counter(
    "celeriac_process_loop_blocked_total", "How often an async handler blocked its event loop for a second"
)
PUBLISH_SECONDS: Final = Histogram(
    "celeriac_process_publish_seconds", "Time that a destination took to confirm a batch of events", ["destination"]
)
SINK_RECOVERY_TOTAL: Final = Counter(
    "celeriac_sink_recovery_total",
    "Transactions that recovery committed or aborted in sinks, by outcome",
    ["sink", "outcome"],
)
CHECKPOINT_TOTAL: Final = Counter("celeriac_checkpoint_total", "Checkpoints of stream consumers, by result", ["result"])
CHECKPOINT_SECONDS: Final = Histogram(
    "celeriac_checkpoint_seconds", "Time from the end of the handler until the entries of a checkpoint are acknowledged"
)
RECEIPTS_TOTAL: Final = Counter("celeriac_receipts_total", "Receipts of new messages, by level", ["level"])
RECEIPT_ACCEPT_SECONDS: Final = Histogram(
    "celeriac_receipt_accept_seconds",
    "Time to write a message to the receipt log",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
RECEIPT_ACK_SECONDS: Final = Histogram(
    "celeriac_receipt_ack_seconds",
    "Time from when a chat message arrived until its first receipt was sent",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
RECEIPT_SAVE_LAG_SECONDS: Final = Histogram(
    "celeriac_receipt_save_lag_seconds",
    "Time from when a message was accepted until it was saved",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600),
)
RECEIPT_FAILURES_TOTAL: Final = Counter(
    "celeriac_receipt_failures_total",
    "Failures of receipts: publish (to the log), deliver, save, duplicate (found by the ledger)",
    ["kind"],
)
RECEIPT_PROMISES_MISSED_TOTAL: Final = Counter(
    "celeriac_receipt_promises_missed_total", "Messages that were saved or rejected later than promised"
)
LEDGER_UNREACHABLE: Final = Gauge(
    "celeriac_process_waits_for_ledger", "1 while a process waits for PostgreSQL", multiprocess_mode="livemax"
)


def share_between_processes() -> None:
    """Keep the counters in files from now on, so that one scrape sees all processes of this program.

    prometheus_client chooses between memory and files when it is first imported, and Flower's plug-in for Celery
    imports it before our code runs. So the choice is repeated here; the metrics restart from zero.
    """
    if _FOLDER not in os.environ:
        for metric in all_metrics():
            metric.clear()  # refused once the folder is set
    _choose_folder()
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()  # type: ignore[no-untyped-call]
    for metric in all_metrics():
        if not metric._labelnames:
            metric._metric_init()


def all_metrics() -> list[Counter | Gauge | Histogram]:
    """Return every metric of this module."""
    return [value for value in globals().values() if isinstance(value, Counter | Gauge | Histogram)]


def forget_process(pid: int) -> None:
    """Drop the gauges of a child process that has ended; its counters stay."""
    if _FOLDER in os.environ:
        mark_process_dead(pid)  # type: ignore[no-untyped-call]


def observe_many(histogram: Histogram, values: Iterable[float]) -> None:
    """Observe all values with one write per bucket, instead of two writes per value."""
    values = sorted(values)
    histogram._sum.inc(sum(values))
    below = 0
    for bound, bucket in zip(histogram._upper_bounds, histogram._buckets, strict=True):
        up_to = bisect_right(values, bound)
        if up_to > below:
            bucket.inc(up_to - below)
        below = up_to


def exposition() -> bytes:
    """Return the metrics of this program and its child processes in Prometheus's text format."""
    return generate_latest(_registry())


def serve(port: int, host: str) -> tuple[WSGIServer, threading.Thread]:
    """Answer /metrics from a thread of this process."""
    return start_http_server(port, addr=host, registry=_registry())


def _registry() -> CollectorRegistry:
    if _FOLDER not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
