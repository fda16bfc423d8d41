"""What helps a task that is not running: for each reason, the page or the button to go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from console.door import PREFIX
from tasks.operations.task_details import Details
from tasks.operations.why_waiting import Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class Advice:
    """A reason why a task is not running, and what helps."""

    code: ReasonCode
    message: str
    title: str = ""  # of the link
    path: str = ""
    runs_now: bool = False  # the button `Run now` helps
    resumes: str = ""  # the queue for which the button `Resume` helps


LINKS: Final = {
    ReasonCode.WORKER_LOST: ("Workers", "workers"),
    ReasonCode.OVER_LIMIT: ("Limits", "queues#limits-title"),
    ReasonCode.UNKNOWN_QUEUE: ("Queues", "queues"),
    ReasonCode.UNKNOWN_HANDLER: ("Workers and their types", "workers"),
    ReasonCode.BROKER_UNREACHABLE: ("Outbox", "outbox"),
    ReasonCode.NO_WORKER: ("Workers", "workers"),
    ReasonCode.WAKEUP_IN_OUTBOX: ("Outbox", "outbox"),
    ReasonCode.WAKEUP_IN_BROKER: ("Workers", "workers"),
    ReasonCode.WAKEUP_LOST: ("Workers", "workers"),
}


def advice(reason: Reason, details: Details) -> Advice:
    """Return the reason with what helps, if anything does."""
    match reason.code:
        case ReasonCode.NOT_DUE:
            return Advice(reason.code, reason.message, runs_now=True)
        case ReasonCode.NOT_ITS_TURN if details.blocker is not None:
            return Advice(
                reason.code, reason.message, "The task that blocks it", f"{PREFIX}/tasks/{details.blocker.task_id}"
            )
        case ReasonCode.QUEUE_PAUSED:
            queue = details.task.queue
            path = f"{PREFIX}/queues#{quote(queue)}"
            return Advice(reason.code, reason.message, f"The queue {queue}", path, resumes=queue)
        case code if code in LINKS:
            title, page = LINKS[code]
            return Advice(code, reason.message, title, f"{PREFIX}/{page}")
    return Advice(reason.code, reason.message)
