"""The parent of `manage.py kafka-worker`: starts its processes, replaces those that are killed, ends all of them.

A handler that exceeds its hard limit costs its process, and so may anything else: the parent starts another, and takes
over the leases of the lost one at once, as the main process of a Celery worker does. A process that gives up has said
why; the others are ended too, and whoever started the parent decides.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Final

import metrics
import settings
from settings import ROOT
from tasks.core.holders import WORKER, WORKER_VARIABLE
from tasks.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.2
SHORTEST_LIFE_SECONDS: Final = 2.0  # one that dies in its first moments does not take the machine with it
END_SECONDS: Final = 30.0


class Processes:
    """`count` children, each with a consumer of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.children: list[subprocess.Popen[bytes]] = []

    def run(self, stopped: threading.Event) -> int:
        """Until the event is set; returns the exit code."""
        metrics.share_between_processes()
        if port := settings.current().worker_metrics_port:
            metrics.serve(port)
        attendant = WorkerWatch(self._pids, runs_ticks=False)
        try:
            self.children = [_start() for _ in range(self.count)]
            started_at = time.monotonic()
            attendant.start()
            while not stopped.wait(LOOK_SECONDS):
                for child in [child for child in self.children if child.poll() is not None]:
                    if child.returncode > 0:
                        return child.returncode
                    logger.warning("process %d has ended (%d) and is replaced", child.pid, child.returncode)
                    stopped.wait(started_at + SHORTEST_LIFE_SECONDS - time.monotonic())
                    self.children.remove(child)
                    self.children.append(_start())
                    started_at = time.monotonic()
            return 0
        finally:
            attendant.stop()
            self._end()

    def _pids(self) -> set[int]:
        return {child.pid for child in self.children if child.poll() is None}

    def _end(self) -> None:
        for child in self.children:
            child.terminate()
        deadline = time.monotonic() + END_SECONDS
        for child in self.children:
            try:
                child.wait(max(deadline - time.monotonic(), 0))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
                child.wait()


def _start() -> subprocess.Popen[bytes]:
    """It counts into the parent's folder, which the parent serves."""
    environment = {**os.environ, "WORKER_METRICS_PORT": "0", WORKER_VARIABLE: WORKER}
    environment.pop("CELERIAC_METRICS_DIR", None)
    command = [sys.executable, str(ROOT / "manage.py"), "kafka-worker", "--child-of", str(os.getpid())]
    return subprocess.Popen(command, env=environment)
