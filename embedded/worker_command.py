"""The command line of the worker that runs tasks: Celery's, or Kafka's if INGEST_QUEUE=kafka.

The embedded stack starts it directly; `manage.py worker` becomes it, so that Compose needs no choice of its own.
"""

from __future__ import annotations

import sys
from typing import Final

from settings import ROOT, Settings

NODE: Final = "ingest"  # the first half of the worker's name in Celery


def worker_command(settings: Settings, *, processes: int, level: str) -> list[str]:
    if settings.ingest_queue == "kafka":
        kafka = [sys.executable, str(ROOT / "manage.py"), "kafka-worker"]
        return [*kafka, "--processes", str(processes), "--log-level", level]
    others = ",".join(map(settings.broker_queue, ("system", "receipts")))
    return [
        *celery_command(settings, level),
        *("worker", "-n", f"{NODE}@%h", "-X", others, "-c", str(processes)),
        *quiet_start(level),
    ]


def celery_command(settings: Settings, level: str) -> list[str]:
    has_banner = level == "info" and settings.log_format == "text"
    quiet = [] if has_banner else ["-q"]
    return [sys.executable, "-m", "celery", *quiet, "-A", "tasks"]


def quiet_start(level: str) -> list[str]:
    return ["--without-gossip", "--without-mingle", "-l", level]
