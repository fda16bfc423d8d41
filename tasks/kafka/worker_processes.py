"""The parent process of `manage.py kafka-worker`: starts worker processes, replaces killed ones, ends them all.

A handler that exceeds its hard limit is killed together with its process. The parent then starts another process and
reclaims the leases of the lost one at once, as the main process of a Celery worker does. A process that exits with an
error has logged the reason; the parent ends the others and exits with the same code.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Final

import metrics
import settings
from child_process import ChildProcess, end_all
from models.engine import engine
from settings import ROOT
from tasks.core.holders import WORKER, WORKER_VARIABLE
from tasks.core.registered_types import Registration
from tasks.core.registry import handlers
from tasks.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.2
SHORTEST_LIFE_SECONDS: Final = 2.0  # a process that dies at once must not be replaced in a busy loop
END_SECONDS: Final = 30.0


class WorkerProcesses:
    """`count` processes, each with its own consumer."""

    def __init__(self, count: int, *, level: str) -> None:
        self.count = count
        self.level = level  # of the log
        self.children: list[ChildProcess] = []

    def run(self, stopped: threading.Event) -> int:
        """Keep the processes running until the event is set. Return the exit code."""
        metrics.share_between_processes()
        if port := settings.current().worker_metrics_port:
            metrics.serve(port, settings.current().metrics_host)
        current = settings.current()
        registration = Registration(
            engine(), current, handlers(), consumed=current.ingest_queues, topic=current.kafka_topic
        )
        watch = WorkerWatch(self._pids, runs_ticks=False, registration=registration)
        try:
            self.children = [self._start() for _ in range(self.count)]
            started_at = time.monotonic()
            watch.start()
            while not stopped.wait(LOOK_SECONDS):
                for child in list(self.children):
                    code = child.exit_code()
                    if code is None:
                        continue
                    if code > 0:
                        return code
                    logger.warning(
                        "worker process %d ended (%d); starting another",
                        child.pid,
                        code,
                        extra={"event": "worker_process_replaced"},
                    )
                    stopped.wait(started_at + SHORTEST_LIFE_SECONDS - time.monotonic())
                    self.children.remove(child)
                    self.children.append(self._start())
                    started_at = time.monotonic()
            return 0
        finally:
            watch.stop()
            end_all(self.children, END_SECONDS)

    def _pids(self) -> set[int]:
        return {child.pid for child in self.children if child.exit_code() is None}

    def _start(self) -> ChildProcess:
        """Start a process that counts into the parent's metrics folder; the parent serves the sum."""
        environment = {**os.environ, "WORKER_METRICS_PORT": "0", WORKER_VARIABLE: WORKER}
        environment.pop("CELERIAC_METRICS_DIR", None)
        command = [sys.executable, str(ROOT / "manage.py"), "kafka-worker", "--child-of", str(os.getpid())]
        command += ["--log-level", self.level]
        return ChildProcess("kafka-worker", command, environment=environment)
