"""A process of `manage.py kafka-worker`: takes ids from Kafka and runs what the guard admits, until it is told to end.

A ledger that does not answer is waited for, with the records in hand; Kafka gives them to nobody else meanwhile.
SIGTERM and SIGINT end the running handler, whose batch is given back unburned, and nothing else of ours: between a
claim and its batch an exception would leave the tasks to reclaim. What was taken and not claimed is still Kafka's.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Final

from confluent_kafka import KafkaException
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

import settings
from models.engine import engine
from models.errors import CeleriacError
from models.schema import require_ready
from outbox.after_commit_publisher import submitter
from tasks.core.batch_size import smallest_batch
from tasks.core.logs import configure_logging
from tasks.core.registry import handlers
from tasks.execution.deliver import ingest
from tasks.execution.run_handler import call, call_outside
from tasks.execution.stopping import WorkerStops
from tasks.kafka.intake import MOST_IDS, Intake

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 1.0  # before a ledger that did not answer is asked again
NAG_SECONDS: Final = 0.5
FLUSH_SECONDS: Final = 5.0
_CALLING: Final = {call.__code__, call_outside.__code__}


class Worker:
    """One consumer and the ledger."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self.engine = engine
        self.intake = intake
        self.stopped = threading.Event()

    def turn(self, seconds: float = POLL_SECONDS) -> int:
        """One poll and all that it brings; returns how many ids that were."""
        # What is too slow for one batch is woken anew: whoever took many such records would wake-up for nearly all of them,
        # each time.
        ids = self.intake.take(seconds, most=smallest_batch(handlers().values()) or MOST_IDS)
        taken = len(ids)
        while ids and not self.stopped.is_set():
            try:
                ingest(self.engine, ids, owned=self.intake.owned)
                break
            except (DBAPIError, CeleriacError) as error:
                logger.warning("to be tried again: %s", str(error).partition("\n")[0])
            except Exception:  # a fault of ours; what is claimed is settled or reclaimed, the rest is in our hands
                logger.exception("to be tried again")
            self.stopped.wait(PAUSE_SECONDS)
            ids = self.intake.waiting()
        return taken

    def run(self, *, parent: int) -> None:
        """Until it is stopped, or its parent is gone."""
        while not self.stopped.is_set() and os.getppid() == parent:
            self.turn()

    def stop(self, _number: int, frame: FrameType | None) -> None:
        """A signal. One that finds no handler running is sent again: another may start before the batch is done."""
        if not self.stopped.is_set():
            self.stopped.set()
            threading.Thread(target=_nag, name="kafka-nag", daemon=True).start()
        while frame is not None:
            if frame.f_code in _CALLING:
                raise WorkerStops(0)
            frame = frame.f_back


def work(*, parent: int) -> None:
    """What a child does. Errors of the start are sentences, said by its door."""
    configure_logging(logging.INFO)
    require_ready(newer_is_ready=True)
    handlers()
    worker = Worker(engine(), Intake(settings.current()))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    try:
        worker.turn(0)
        if path := os.environ.get("CELERIAC_READY_FILE"):
            Path(path).touch()
        worker.run(parent=parent)
    except SystemExit:
        logger.info("told to end: the running batch was given back")
    except KafkaException as error:
        logger.error("Kafka: %s", error)
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        worker.intake.close()
        submitter().flush(FLUSH_SECONDS)


def _nag() -> None:
    while True:
        threading.Event().wait(NAG_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
