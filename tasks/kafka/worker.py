"""A worker process of `manage.py kafka-worker`: takes task ids from Kafka and runs the tasks it can claim.

While the ledger is unreachable, the process waits and keeps its records; Kafka gives them to no other worker. SIGTERM
and SIGINT interrupt the running handler only, and its batch is released without counting an attempt. They do not
interrupt our own code: an exception between a claim and its batch would leave the tasks to reclaim. Records whose tasks
were not claimed stay with Kafka.
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
from models.ledger_outage import wait_for_ledger
from models.schema import require_ready
from outbox.after_commit_publisher import after_commit_publisher
from tasks.core.batch_size import smallest_batch
from tasks.core.logs import configure_logging
from tasks.core.registry import handlers
from tasks.execution.call_handler import call_handler
from tasks.execution.deliver import deliver
from tasks.execution.event_loop import interruptible
from tasks.execution.stopping import WorkerStops
from tasks.kafka.intake import MOST_IDS, Intake

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 1.0  # before an unreachable ledger is tried again
REPEAT_SIGNAL_SECONDS: Final = 0.5
FLUSH_SECONDS: Final = 5.0
_CALLING: Final = (call_handler.__code__, interruptible.__code__)  # the second one runs the loop of async handlers
_WAITING: Final = wait_for_ledger.__code__


class Worker:
    """One consumer and the ledger it claims from."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self.engine = engine
        self.intake = intake
        self.stopped = threading.Event()

    def turn(self, seconds: float = POLL_SECONDS) -> int:
        """Poll once and run the tasks. Return how many ids the poll brought."""
        # A claim leaves out slow tasks that do not fit into a batch, and sends new wake-ups for them. So take no more
        # ids than the smallest batch, or nearly all of them would be sent again each time.
        ids = self.intake.take(seconds, most=smallest_batch(handlers().values()) or MOST_IDS)
        taken = len(ids)
        while ids and not self.stopped.is_set():
            try:
                deliver(self.engine, ids, owned=self.intake.owned)
                break
            except (DBAPIError, CeleriacError) as error:
                logger.warning(
                    "will try again: %s", str(error).partition("\n")[0], extra={"event": "delivery_repeated"}
                )
            except Exception:  # our own bug: claimed tasks are settled or reclaimed, and we still have the others
                logger.exception("will try again", extra={"event": "delivery_repeated"})
            self.stopped.wait(PAUSE_SECONDS)
            ids = self.intake.waiting()
        return taken

    def run(self, *, parent: int) -> None:
        """Work until this process is stopped or its parent has ended."""
        while not self.stopped.is_set() and os.getppid() == parent:
            self.turn()

    def stop(self, _number: int, frame: FrameType | None) -> None:
        """Handle a signal: interrupt the running handler, or the wait for an unreachable ledger.

        The signal is repeated, because the batch may call another handler after the first signal.
        """
        if not self.stopped.is_set():
            self.stopped.set()
            threading.Thread(target=_repeat_signal, name="kafka-repeat-signal", daemon=True).start()
        if frame is not None and frame.f_code is _WAITING:  # it sleeps until the ledger may answer again
            raise WorkerStops(0)
        while frame is not None:
            if frame.f_code in _CALLING:
                raise WorkerStops(0)
            frame = frame.f_back


def work(*, parent: int, level: str) -> None:
    """Run a worker process until it is told to end. Errors at the start are printed by the command."""
    configure_logging(level)
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
        logger.info("told to end: the running batch was released", extra={"event": "worker_stopped"})
    except KafkaException as error:
        logger.error("Kafka: %s", error, extra={"event": "kafka_error"})
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        worker.intake.close()
        after_commit_publisher().wait_until_idle(FLUSH_SECONDS)


def _repeat_signal() -> None:
    while True:
        threading.Event().wait(REPEAT_SIGNAL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
