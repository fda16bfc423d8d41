"""Kill the worker of a task at every window, recover, deliver again, and count the effects.

    report = crash_test("invoice.settle", {"number": 17}, effects=count_effects)
    report.assert_once()

A first worker runs a task undisturbed and records which failpoints it passes. These are the windows: between any two
of them, in your handler, in its steps and sinks, and in our own code. Then, for each window and each pass of it, a
worker process claims a new task and is killed there with SIGKILL. What production does next is done at once: the lease
of the dead process is reclaimed, sinks are recovered, and the task is delivered again until it is final.

Unlike `run`, this commits: it needs the fixture `celeriac_stack`, or another stack of your tests. Your handler must
pass the same failpoints each time; a random one cannot be tested like this.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import settings
from models.engine import autocommit, engine
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit_publisher import after_commit_publisher
from sinks.recovery import recover
from tasks.core.holders import holder_of
from tasks.core.registry import find
from tasks.execution.deliver import deliver
from tasks.recovery.reclaim import reclaim_leases
from tasks.submission.submit import submit
from tasks.testing import forked_worker
from tasks.testing.crash_report import Crash, CrashReport
from tasks.testing.windows import Window, read_windows

MOST_PASSES: Final = 10  # of one window
MOST_DELIVERIES: Final = 10  # after the crash
LEAST_ATTEMPTS: Final = 3  # the crash counts as one
PATIENCE_SECONDS: Final = 10.0
FINAL: Final = (TaskStatus.SUCCEEDED, TaskStatus.DEAD, TaskStatus.DISCARDED)
MAKE_DUE: Final = sql("""
    UPDATE ledger.ingest_task SET next_retry_at = (SELECT ledger.ledger_now())
    WHERE id = :id AND next_retry_at > (SELECT ledger.ledger_now()) AND status IN ('QUEUED', 'RETRYING')
""")
STATE: Final = sql("SELECT status, error_message FROM ledger.ingest_task WHERE id = :id")
UNFINISHED: Final = sql("""
    SELECT count(*) FROM ledger.sink_transaction WHERE task_id = :id AND state NOT IN ('committed', 'aborted')
""")
Effects = Callable[[uuid.UUID], int]


def crash_test(
    type: str, payload: Any = None, *, effects: Effects, most_passes: int = MOST_PASSES, **how: Any
) -> CrashReport:
    """Kill the worker of a task of this type at every window, and return what became of each task.

    `effects(task_id)` counts the effects of one task, at the place where they happen. If `payload` is a function, it is
    called with the number of each task, so that tasks can differ. `most_passes` limits how many passes of one window
    are tried; a long loop may pass a window often. `how` is what `submit` takes.
    """
    attempts = find(type).max_attempts or settings.current().ingest_max_attempts
    how.setdefault("max_attempts", max(attempts, LEAST_ATTEMPTS))
    crashes: list[Crash] = []

    def crash(window: Window | None, trace: str = "") -> Crash:
        new = payload(len(crashes)) if callable(payload) else payload
        with engine().begin() as connection:  # a plain connection: no thread of this process publishes a wake-up
            task_id = submit(connection, type, new, **how).task_id
        return _crash(task_id, window, effects, trace)

    with tempfile.TemporaryDirectory(prefix="celeriac-crash-test-") as folder:
        trace = Path(folder, "trace")
        crashes.append(crash(None, str(trace)))
        windows = read_windows(trace)
    tried = [window for window in windows if window.nth <= most_passes] if crashes[0].is_right else []
    for window in tried:
        crashes.append(crash(window))
    return CrashReport(type, tuple(crashes), len(windows) - len(tried) if tried else 0)


def _crash(task_id: uuid.UUID, window: Window | None, effects: Effects, trace: str) -> Crash:
    ending = _run_worker(task_id, window.failpoints("kill") if window else "", trace)
    for _ in range(MOST_DELIVERIES):
        if _state(task_id)[0] in FINAL:
            break
        _run_worker(task_id)
    status, error = _state(task_id)
    if window and not ending.was_killed:
        error = f"its worker did not pass this window: it {ending}"
    elif status is TaskStatus.SUCCEEDED and _count_unfinished(task_id):
        error = "a transaction in a sink is not finished"
    return Crash(window, task_id, status, effects(task_id), error)


def _run_worker(task_id: uuid.UUID, failpoints: str = "", trace: str = "") -> forked_worker.Ending:
    """Deliver the task to a new worker process; clean up after the process as the others would if it has died."""

    def work() -> None:
        deliver(engine(), [task_id])
        _wait_for_publisher()

    with autocommit(engine()) as connection:
        connection.execute(MAKE_DUE, {"id": task_id})
    _wait_for_publisher()  # a lock that its thread holds during the fork would never be free in the child
    pid = forked_worker.start(work, failpoints=failpoints, trace=trace)
    ending = forked_worker.wait(pid)
    reclaim_leases(engine(), settings.current(), holders=[holder_of(pid)])
    recover(engine())
    return ending


def _wait_for_publisher() -> None:
    if publisher := after_commit_publisher.made:
        publisher.wait_until_idle(PATIENCE_SECONDS)


def _state(task_id: uuid.UUID) -> tuple[TaskStatus, str | None]:
    with engine().connect() as connection:
        status, error = connection.execute(STATE, {"id": task_id}).one()
    return TaskStatus(status), error


def _count_unfinished(task_id: uuid.UUID) -> int:
    with engine().connect() as connection:
        return int(connection.execute(UNFINISHED, {"id": task_id}).scalar_one())
