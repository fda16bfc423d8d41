"""The metrics of the whole installation: counters from the tally, gauges from the ledger and the broker at scrape time.

Every process that asks gets the same numbers, so Prometheus scrapes one of the API's processes for them. Gauges that
cannot be read because a server does not answer are left out; `celeriac_ledger_unreachable` and
`celeriac_broker_unreachable` say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from sqlalchemy.exc import SQLAlchemyError

import settings
from models.engine import engine
from models.errors import CeleriacError
from models.ledger_outage import is_outage
from tally.histograms import BOUNDS, add
from tally.subjects import Subject
from tally.totals import Total, read_totals
from tasks import broker
from tasks.operations.gauges import BusyWorker, Gauges, read_busy_workers, read_gauges
from tasks.operations.metrics_text import Histograms, write_metrics

GROUP: Final = "ingest-workers"

# Every metric: its name, its meaning and its labels. docs/metrics.md is generated from this.
COUNTERS: Final = {
    "ingest_task_process": ("Deliveries of tasks, by result", ("result", "queue", "type")),
    "ingest_stream_reclaim": (
        "Tasks reclaimed from lost workers (claimed), and leases that could not be reclaimed (error)",
        ("result",),
    ),
    "ingest_task_dlq": ("Tasks whose letter was written to the dead-letter queue", ()),
    "outbox_publish": ("Events, by the result of publishing them", ("result", "destination")),
    "celeriac_outbox_flush": ("What happened to events, by the code of the audit", ("code",)),
    "celeriac_lease_expired": ("Leases of workers that expired and were reclaimed", ()),
    "celeriac_lease_lost": ("Tasks that could not be settled because their lease was lost", ()),
}
HISTOGRAMS: Final = {
    "ingest_task_process_seconds": ("Time in the handler, by result", ("result", "queue", "type")),
    "celeriac_task_wait_seconds": ("Time from when a task was due until it was claimed", ("queue", "type")),
    "outbox_publish_seconds": ("Time that a destination took to confirm a batch, by result", ("result",)),
    "outbox_publish_delay_seconds": ("Time from when an event was due until it was sent", ()),
}
GAUGES: Final = {
    "ingest_stream_length": ("Messages in a queue of the broker, or entries in a receipt stream", ("stream",)),
    "ingest_stream_pending": ("RUNNING tasks of a queue, or entries that a group is consuming", ("stream", "group")),
    "outbox_backlog": ("Events that are not sent: NEW and RETRYING; an estimate above 10,000", ()),
    "celeriac_outbox_scheduled": ("Unsent outbox events that are not due yet", ()),
    "celeriac_task_oldest_due_seconds": ("How long the oldest due task of a queue has waited", ("queue",)),
    "celeriac_backlog_alert": ("1 if more than BACKLOG_ALERT_THRESHOLD tasks are due in a queue", ("queue",)),
    "celeriac_queue_workers": ("Workers that consume a queue and were seen lately", ("queue",)),
    "celeriac_prepared_transactions": ("Transactions in sinks that are not finished", ()),
    "celeriac_prepared_transaction_oldest_seconds": ("Age of the oldest unfinished transaction in a sink", ()),
    "celeriac_ledger_horizon_seconds": ("Age of the oldest snapshot, which keeps vacuum from removing dead rows", ()),
    "celeriac_tick_last_seconds": ("Time since a tick last ended", ("tick",)),
    "celeriac_ledger_unreachable": ("1 if PostgreSQL did not answer during this scrape", ()),
    "celeriac_broker_unreachable": ("1 if the broker did not answer during this scrape", ()),
}
# The names of celery-exporter for the same numbers, if METRICS_CELERY_NAMES is set: which results each counter adds up.
# A task is sent, received and started once for each attempt; it is counted when the attempt has ended.
_ATTEMPTS: Final = ("succeeded", "retry", "dead", "discarded", "snoozed", "released", "lease_lost")
CELERY_COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "celery_task_sent": _ATTEMPTS,
    "celery_task_received": _ATTEMPTS,
    "celery_task_started": _ATTEMPTS,
    "celery_task_succeeded": ("succeeded",),
    "celery_task_failed": ("dead",),
    "celery_task_retried": ("retry",),
    "celery_task_revoked": ("discarded",),
}
CELERY_LABELS: Final = ("name", "queue_name")
_BOUNDS: Final = (*map(floatToGoString, BOUNDS), "+Inf")


Samples = Iterable[tuple[Sequence[str], float]]


def exposition(streams: Callable[[], tuple[Samples, Samples]] = lambda: ((), ())) -> bytes:
    """Return the metrics in Prometheus's text format. `streams` reads lengths and pending entries of streams.

    A thread asks the broker and reads the streams while PostgreSQL works.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="scrape") as thread:
        depths, read = thread.submit(_read_depths), thread.submit(streams)
        return write_metrics(_collect(depths, read))


def exposition_without_ledger() -> bytes:
    """Return what can be said while the ledger does not answer."""
    return write_metrics([_gauge("celeriac_ledger_unreachable", [((), 1)])])


def _read_depths() -> dict[str, int] | None:
    """Return the number of messages in each queue; None if the broker does not answer."""
    current = settings.current()
    queues = [*current.ingest_queues, "system", "receipts", *filter(None, [current.ingest_dlq_queue])]
    try:
        return broker.depths(queues, patience_seconds=broker.SHOWN_SECONDS)
    except CeleriacError:
        return None


def _collect(asked: Future[dict[str, int] | None], streams: Future[tuple[Samples, Samples]]) -> Iterator[Metric]:
    celery_names = settings.current().metrics_celery_names
    try:
        with engine().connect() as connection:
            totals = read_totals(connection)
            gauges = read_gauges(connection)
            busy = read_busy_workers(connection) if celery_names else []
    except (SQLAlchemyError, CeleriacError) as error:
        if not is_outage(error):
            raise
        yield _gauge("celeriac_ledger_unreachable", [((), 1)])
    else:
        yield _gauge("celeriac_ledger_unreachable", [((), 0)])
        yield from _counters(totals)
        yield from _histograms(totals)
        yield from _gauges(gauges, streams.result()[1])
        if celery_names:
            yield from _celery_counters(totals)
            yield from _celery_gauges(busy)
    depths = asked.result()
    yield _gauge("celeriac_broker_unreachable", [((), depths is None)])
    in_queues = [((queue,), depth) for queue, depth in (depths or {}).items()]
    yield _gauge("ingest_stream_length", [*in_queues, *streams.result()[0]])
    if celery_names and depths:
        family = GaugeMetricFamily("celery_queue_length", "Messages in a queue", labels=["queue_name"])
        for labels, depth in in_queues:
            family.add_metric(labels, depth)
        yield family


def _counters(totals: Sequence[Total]) -> Iterator[Metric]:
    def of(subject: Subject, *results: str) -> list[Total]:
        return [each for each in totals if each.subject is subject and (not results or each.result in results)]

    values: dict[str, Samples] = {
        "ingest_task_process": [((each.result, each.queue, each.type), each.count) for each in of(Subject.TASK)],
        "ingest_stream_reclaim": [((each.result,), each.count) for each in of(Subject.RECLAIM)],
        "ingest_task_dlq": [((), sum(each.count for each in of(Subject.DEAD_LETTER)))],
        "outbox_publish": [((each.result, each.queue), each.count) for each in of(Subject.PUBLISH)],
        "celeriac_outbox_flush": [((each.result,), each.count) for each in of(Subject.FLUSH)],
        "celeriac_lease_expired": [((), sum(each.count for each in of(Subject.LEASE, "expired")))],
        "celeriac_lease_lost": [((), sum(each.count for each in of(Subject.LEASE, "lost")))],
    }
    for name, samples in values.items():
        meaning, labels = COUNTERS[name]
        family = CounterMetricFamily(name, meaning, labels=labels)
        for given, value in samples:
            family.add_metric(given, value)
        yield family


def _histograms(totals: Sequence[Total]) -> Iterator[Metric]:
    tasks = [each for each in totals if each.subject is Subject.TASK]
    events = [each for each in totals if each.subject is Subject.PUBLISH]
    run = {(each.result, each.queue, each.type): (each.run, each.run_seconds) for each in tasks if each.run}
    yield _histogram("ingest_task_process_seconds", run.items())
    waits = _summed(((each.queue, each.type), each.wait, each.wait_seconds) for each in tasks if each.wait)
    yield _histogram("celeriac_task_wait_seconds", waits.items())
    publishes = _summed(((each.result,), each.run, each.run_seconds) for each in events if each.run)
    yield _histogram("outbox_publish_seconds", publishes.items())
    delays = _summed(((), each.wait, each.wait_seconds) for each in events if each.wait)
    yield _histogram("outbox_publish_delay_seconds", delays.items())


def _summed(given: Iterable[tuple[tuple[str, ...], Sequence[int], float]]) -> dict[tuple[str, ...], tuple[Any, float]]:
    found: dict[tuple[str, ...], tuple[list[int], float]] = {}
    for labels, counts, seconds in given:
        known, known_seconds = found.get(labels, ([], 0.0))
        found[labels] = (add(known, counts), known_seconds + seconds)
    return found


def _histogram(name: str, samples: Iterable[tuple[Sequence[str], tuple[Sequence[int], float]]]) -> Metric:
    meaning, labels = HISTOGRAMS[name]
    family = Histograms(name, meaning, labels)
    for given, (counts, seconds) in samples:
        family.add_metric(given, _buckets(counts), seconds)
    return family


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return for each bound how many values are not above it."""
    padded = [*counts, *[0] * (len(BOUNDS) + 1 - len(counts))]
    return list(zip(_BOUNDS, accumulate(padded), strict=True))


def _gauges(found: Gauges, pending: Samples) -> Iterator[Metric]:
    running = (((queue, GROUP), count) for queue, count in found.running.items())
    yield _gauge("ingest_stream_pending", [*running, *pending])
    yield _gauge("outbox_backlog", [((), found.unsent_events)])
    yield _gauge("celeriac_outbox_scheduled", [((), found.scheduled_events)])
    yield _gauge("celeriac_task_oldest_due_seconds", [((queue,), age) for queue, age in found.oldest_due.items()])
    yield _gauge("celeriac_backlog_alert", [((queue,), is_on) for queue, is_on in found.backlog_alerts.items()])
    yield _gauge("celeriac_queue_workers", [((queue,), count) for queue, count in found.workers.items()])
    yield _gauge("celeriac_prepared_transactions", [((), found.prepared)])
    yield _gauge("celeriac_prepared_transaction_oldest_seconds", [((), found.oldest_prepared)])
    yield _gauge("celeriac_ledger_horizon_seconds", [((), found.horizon)])
    yield _gauge("celeriac_tick_last_seconds", [((tick,), age) for tick, age in found.ticks.items()])


def _gauge(name: str, samples: Samples) -> Metric:
    meaning, labels = GAUGES[name]
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for given, value in samples:
        family.add_metric(given, value)
    return family


def _celery_counters(totals: Sequence[Total]) -> Iterator[Metric]:
    tasks = [each for each in totals if each.subject is Subject.TASK]
    for name, results in CELERY_COUNTERS.items():
        family = CounterMetricFamily(name, f"Attempts with the result {' or '.join(results)}", labels=CELERY_LABELS)
        counted: Counter[tuple[str, str]] = Counter()
        for each in tasks:
            if each.result in results:
                counted[each.type, each.queue] += each.count
        for kind, count in counted.items():
            family.add_metric(kind, count)
        yield family
    runtime = Histograms("celery_task_runtime", "Time in the handler", CELERY_LABELS)
    times = _summed(((each.type, each.queue), each.run, each.run_seconds) for each in tasks if each.run)
    for labels, (counts, seconds) in times.items():
        runtime.add_metric(labels, _buckets(counts), seconds)
    yield runtime


def _celery_gauges(workers: Sequence[BusyWorker]) -> Iterator[Metric]:
    up = GaugeMetricFamily("celery_worker_up", "1 if a worker was seen lately", labels=["hostname"])
    active = GaugeMetricFamily("celery_worker_tasks_active", "Tasks that a worker runs", labels=["hostname"])
    count = GaugeMetricFamily("celery_active_worker_count", "Live workers of a queue", labels=["queue_name"])
    processes = GaugeMetricFamily("celery_active_process_count", "Their processes", labels=["queue_name"])
    for each in workers:
        up.add_metric([each.worker], each.is_live)
        active.add_metric([each.worker], each.running)
    live = [each for each in workers if each.is_live]
    for queue in sorted({queue for each in live for queue in each.queues}):
        of_queue = [each for each in live if queue in each.queues]
        count.add_metric([queue], len(of_queue))
        processes.add_metric([queue], sum(each.processes for each in of_queue))
    yield from (up, active, count, processes)
