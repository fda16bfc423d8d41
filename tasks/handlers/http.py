"""http.request: POST to a named destination through the outbox.

    {"destination": "crm", "body": {…}, "orderingKey": "customer 17"}

The event is written in the task's own transaction. SUCCEEDED means that the outbox has it; `eventId` in the result
names it. The outbox delivers it at least once, with the same Idempotency-Key each time. If the task was submitted over
HTTP, its principal comes before the ordering key, so that no principal can block another's key.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from sqlalchemy.orm import Session

import outbox
import settings
from outbox.canonical_json import BadPayload
from outbox.destinations import UnknownDestination, open_poster
from tasks import Permanent, Task, handler
from tasks.submission.json_lines import describe_invalid


class Request(BaseModel):
    """The payload: a destination, and the body to send."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_alias=True, extra="forbid", frozen=True)

    destination: str
    body: Any = None
    ordering_key: Annotated[str, Field(min_length=1, max_length=500)] | None = None


@handler("http.request")
def request(task: Task, db: Session) -> dict[str, int]:
    try:
        wanted = Request.model_validate(task.payload)
        objection = open_poster(wanted.destination, settings.current()).objection
    except ValidationError as error:
        raise Permanent(f"The request is invalid: {describe_invalid(error.errors())}.") from None
    except UnknownDestination as error:
        raise Permanent(str(error)) from None
    if objection:
        raise Permanent(objection)
    headers = {"traceparent": task.traceparent}
    ordering_key, principal = wanted.ordering_key, task.context.get("principal")
    if ordering_key is not None and principal is not None:
        ordering_key = f"{principal}:{ordering_key}"
    try:
        event_id = outbox.add(db, wanted.destination, wanted.body, headers=headers, ordering_key=ordering_key)
    except BadPayload as error:
        raise Permanent(error.message) from None
    return {"eventId": event_id}
