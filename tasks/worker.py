"""Prepare a worker when it starts, and each of its child processes.

Celery imports this module (`imports` in `celeryconfig.py`) before it sends `worker_init`, in workers only.
"""

from __future__ import annotations

import gc
import logging
import os
from typing import Any, Final

from billiard import current_process
from celery import signals

import metrics
import settings
from models.engine import engine, make_room_for
from models.schema import require_ready
from tally.counts import counts
from tasks.celery import app
from tasks.core.celery_program import SIGTERM_WARNING, exit_with_message
from tasks.core.holders import WORKER
from tasks.core.registered_types import Registration
from tasks.core.registry import handlers
from tasks.execution.event_sender import EventSender
from tasks.execution.hard_limits import HardLimits
from tasks.execution.task_events import EventChannel, use_channel
from tasks.execution.worker_end import WorkerEnd, use_worker_end
from tasks.pools import PoolSize, SoloPool, ThreadPool, supported_pool
from tasks.worker_watch import ChildPids, WorkerWatch

logger = logging.getLogger(__name__)
STREAMS_STOP_SECONDS: Final = 1.2  # of a worker for the queue `receipts` alone
# Of this process, if it is a worker. All but the watches must be there before its children are forked.
_child_pids: list[ChildPids] = []
_hard_limits: list[HardLimits] = []
_channels: list[EventChannel] = []
_ends: list[WorkerEnd] = []
_watches: list[WorkerWatch] = []


@signals.worker_init.connect
def _start_worker(sender: Any, **_: Any) -> None:
    """Refuse to start without a ledger, with an old schema, or with an unsupported pool: its tasks would fail."""
    with exit_with_message():
        sender.pool_cls = supported_pool(sender.pool_cls)
        if sender.pool_cls is ThreadPool:
            make_room_for(sender.concurrency if isinstance(sender.concurrency, int) else os.cpu_count() or 1)
        if sender.pool_cls is SoloPool:
            app.conf.worker_soft_shutdown_timeout = 0  # the handler cannot go on while a signal handler waits for it
        require_ready(newer_is_ready=True)
        handlers()  # reports a missing handler module now instead of with every task
    metrics.share_between_processes()
    if port := settings.current().worker_metrics_port:
        metrics.serve(port, settings.current().metrics_host)
    _child_pids.append(ChildPids())
    _hard_limits.append(HardLimits())
    _channels.append(EventChannel())
    use_channel(_channels[-1])
    _ends.append(WorkerEnd())
    use_worker_end(_ends[-1])


@signals.celeryd_after_setup.connect
def _report_start(**_: Any) -> None:
    """Log what `_start_worker` cannot: logging is configured only after it."""
    if os.environ.get("REMAP_SIGTERM") != "SIGQUIT":
        logger.warning(SIGTERM_WARNING, extra={"event": "sigterm_not_remapped"})
    logger.info(
        "The processes of this worker hold leases under names that end with %s.",
        WORKER,
        extra={"event": "worker_started", "worker": WORKER},
    )


@signals.worker_ready.connect
def _start_worker_watch(sender: Any, **_: Any) -> None:
    pool, child_pids = sender.pool, _child_pids[-1]

    def children() -> set[int]:
        """Return the processes of the pool. One that is about to start has no pid; a thread pool has none."""
        return {pid for pid in pool.info.get("processes") or () if pid}

    consumed = _consumed_queues()
    registration = Registration(engine(), settings.current(), handlers(), consumed=consumed)
    can_change = PoolSize.can_change(sender)
    size = PoolSize(sender, worker=registration.worker, queues=consumed) if can_change else None
    watch = WorkerWatch(
        children,
        started=child_pids.received,
        overdue=_hard_limits[-1].overdue,
        runs_ticks=_may_run_ticks(),
        registration=registration,
        resize=size.check if size else None,
    )
    watch.start()
    _watches.append(watch)


@signals.worker_ready.connect
def _stop_soon(**_: Any) -> None:
    """Let a worker that only consumes streams stop sooner: its tasks end within a second when it is told to stop.

    Celery waits for the whole time of a soft shutdown if any task runs, and these run all the time.
    """
    if _consumed_queues() == {"receipts"}:
        app.conf.worker_soft_shutdown_timeout = STREAMS_STOP_SECONDS


def _consumed_queues() -> set[str]:
    prefix = settings.current().broker_queue("")
    return {name.removeprefix(prefix) for name in app.amqp.queues.consume_from}


def _may_run_ticks() -> bool:
    """Return True if this worker is to run the ticks while beat is silent."""
    current = settings.current()
    return current.worker_run_ticks and current.broker_queue("system") in app.amqp.queues.consume_from


@signals.worker_ready.connect
def _start_event_sender(sender: Any, **_: Any) -> None:
    def is_wanted() -> bool | None:
        """Return True if Flower has switched task events on. The worker does not know while it is reconnecting."""
        dispatcher = sender.event_dispatcher
        return None if dispatcher is None else not dispatcher.groups or "task" in dispatcher.groups

    EventSender(app, _channels[-1], hostname=sender.hostname, is_wanted=is_wanted).start()


@signals.worker_shutting_down.connect
def _begin_to_end(**_: Any) -> None:
    for end in _ends:
        end.begin()
    for watch in _watches:
        watch.stop()
    _watches.clear()


@signals.worker_process_shutdown.connect
def _end_child(**_: Any) -> None:
    counts.append()  # a child process does not call what is registered with atexit


@signals.worker_process_init.connect
def _start_child(**_: Any) -> None:
    for child_pids in _child_pids:
        child_pids.send_own()
    place = getattr(current_process(), "index", None)  # None: the main process of a worker with `-P solo`
    if place is not None and _hard_limits:
        _hard_limits[-1].use_slot(place)
    gc.freeze()  # a worker has loaded 100,000 objects; no collection needs to look at them again
