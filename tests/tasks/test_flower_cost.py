"""Measure what a worker spends on Flower. `pytest -m slow -s tests/tasks/test_flower_cost.py` prints it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from celery import Celery

from tasks.core.outcomes import DONE
from tasks.execution.event_sender import EventSender
from tasks.execution.task_events import report_settled, report_started
from tests.nodes.shared import SharedNodes
from tests.servers import ServersOfTests, wait_until
from tests.tasks.celery_settings import application
from tests.tasks.deliveries import submitted
from tests.tasks.execution.event_channels import channel_in_use, written
from tests.tasks.execution.event_listener import new_task
from tests.tasks.work import rows

pytestmark = pytest.mark.slow
TASKS = 4000
BATCH = 100
ROUNDS = 5


@pytest.fixture
def app(nodes: SharedNodes, stack: ServersOfTests) -> Iterator[Celery]:
    with application(nodes.redis().url) as app:
        yield app


def test_cost_of_reporting_and_of_sending_one_task(app: Celery) -> None:
    """Processor time in the child that runs the task, and in the worker's main process."""
    tasks = [new_task() for _ in range(BATCH)]
    settled, seconds = dict.fromkeys(tasks, DONE), dict.fromkeys(tasks, 0.01)

    def report() -> None:
        report_settled(settled, report_started(tasks), seconds)

    off = on = sent = 0.0
    with channel_in_use() as channel:
        sender = EventSender(app, channel, hostname="w@here", is_wanted=lambda: True)
        for _ in range(TASKS // BATCH):
            channel.switch(on=False)
            off += processor_seconds(report)
            channel.switch(on=True)
            channel.grant(BATCH, at_most=BATCH)
            on += processor_seconds(report)
            sender._waiting.extend(written(channel))
            sent += processor_seconds(sender._send)
        sender._drop_connection()
    say(f"reporting, events off: {1e6 * off / (TASKS / BATCH):.2f} µs per batch of {BATCH} tasks")
    say(f"reporting, events on:  {1e6 * on / TASKS:.1f} µs per task shown, in the child")
    say(f"sending:               {1e6 * sent / TASKS:.1f} µs per task shown, in the main process")


def test_cost_of_flower_for_a_worker(app: Celery, nodes: SharedNodes) -> None:
    """Processor time of all processes of a worker for tasks that it gets in messages of 100 ids."""
    worker = nodes.worker(nodes.redis()).process
    measured: dict[bool, list[float]] = {False: [], True: []}
    run(app, worker.pid)  # warm up
    for _ in range(ROUNDS):
        for on in (False, True):
            app.control.broadcast("enable_events" if on else "disable_events", reply=True, timeout=5, limit=1)
            measured[on].append(run(app, worker.pid))
    for on, seconds in measured.items():
        each = [1e6 * one / TASKS for one in seconds]
        median = statistics.median(each)
        say(f"worker, events {'on: ' if on else 'off:'} {median:.0f} µs per task, of {[round(one) for one in each]}")


def run(app: Celery, worker: int) -> float:
    """Run tasks; return the processor time that the worker has used."""
    ids = [str(id_) for id_ in submitted(TASKS, "demo.flaky", {})]
    before = used(worker)
    for start in range(0, TASKS, BATCH):
        app.send_task("tasks.ingest", args=[ids[start : start + BATCH]])
    wait_until(lambda: not rows("id", "status <> 'SUCCEEDED'"), "all are done", seconds=90)
    return used(worker) - before


def used(worker: int) -> float:
    main = psutil.Process(worker)
    return sum(sum(each.cpu_times()[:2]) for each in (main, *main.children()))


def processor_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def say(line: str) -> None:
    sys.stderr.write(f"\n{line}")
