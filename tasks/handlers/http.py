"""http.request: a POST to a named destination, through the outbox.

    {"destination": "crm", "body": {…}, "orderingKey": "customer 17"}

The event is written in the task's own transaction: SUCCEEDED means that it is handed over, and `eventId` says where to
look for what became of it. From there the outbox delivers it at least once, with the same Idempotency-Key each time.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from sqlalchemy.orm import Session

import outbox
import settings
from outbox.canonical import BadPayload
from outbox.destinations import UnknownDestination, open_poster
from tasks.core.outcomes import Permanent
from tasks.core.registry import handler
from tasks.core.task import Task
from tasks.submission.json_lines import said


class Request(BaseModel):
    """What is to be sent, and where to."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_alias=True, extra="forbid", frozen=True)

    destination: str
    body: Any = None
    ordering_key: Annotated[str, Field(min_length=1, max_length=500)] | None = None


@handler("http.request")
def request(task: Task, db: Session) -> dict[str, int]:
    try:
        asked = Request.model_validate(task.payload)
        objection = open_poster(asked.destination, settings.current()).objection
    except ValidationError as error:
        raise Permanent(f"The request cannot be sent: {said(error)}.") from None
    except UnknownDestination as error:
        raise Permanent(str(error)) from None
    if objection:
        raise Permanent(objection)
    traced = {"traceparent": task.context["traceparent"]} if "traceparent" in task.context else {}
    try:
        event_id = outbox.add(db, asked.destination, asked.body, headers=traced, ordering_key=asked.ordering_key)
    except BadPayload as error:
        raise Permanent(error.message) from None
    return {"eventId": event_id}
