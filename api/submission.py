"""What all submitting routes share: the Idempotency-Key header, one transaction, and the receipt."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from api.json_responses import JsonResponse
from api.principals import submit_for
from api.tokens import Token
from models.engine import sessions
from models.errors import Misuse
from tasks.submission.envelope import NewTask
from tasks.submission.submit import Submitted

IDEMPOTENCY_KEY: Final = "idempotency-key"


def read_idempotency_key(request: Request) -> str | None:
    """Return the header's value as UTF-8, so that it equals the same key in a body; None if there is no header."""
    values = request.headers.getlist(IDEMPOTENCY_KEY)
    if not values:
        return None
    if len(values) > 1:
        raise Misuse("There is more than one Idempotency-Key header; send one.")
    try:
        return values[0].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Misuse("The Idempotency-Key is not UTF-8.") from None


def submit_and_commit(token: Token, new: NewTask, key: str | None) -> Submitted:
    """Submit a task in a transaction of its own."""
    with sessions().begin() as session:
        return submit_for(session, token, new, key=key)


def receipt(submitted: Submitted, *, location: str = "/api/tasks/") -> JsonResponse:
    """Answer 202 for a new task and 200 for one that existed before."""
    content = {"taskId": submitted.task_id, "status": submitted.status, "created": submitted.created}
    return JsonResponse(content, 202 if submitted.created else 200, {"Location": f"{location}{submitted.task_id}"})
