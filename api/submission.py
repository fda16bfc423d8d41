"""What routes that submit have in common: the key of the header, one transaction, and the answer after its commit."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

import workflows
from api.json_responses import Answer
from api.principals import submit_for
from api.tokens import Token
from models.engine import sessions
from models.errors import Misuse
from tasks.submission.envelope import NewTask
from tasks.submission.submit import Submitted

KEY: Final = "idempotency-key"


def header_key(request: Request) -> str | None:
    """As UTF-8, like the key in a body: both are the same key."""
    given = request.headers.getlist(KEY)
    if not given:
        return None
    if len(given) > 1:
        raise Misuse("There is more than one Idempotency-Key.")
    try:
        return given[0].encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Misuse("The Idempotency-Key is not UTF-8.") from None


def submitted(token: Token, new: NewTask, key: str | None) -> Submitted:
    """In the ledger when this returns. A workflow that could not be run is refused here, by whichever route it came."""
    if new.type == workflows.TYPE:
        workflows.check(new.payload)
    with sessions().begin() as session:
        return submit_for(session, token, new, key=key)


def receipt(made: Submitted, *, location: str = "/api/tasks/") -> Answer:
    """202 for a task that is there now, 200 for one that was there before."""
    said = {"taskId": made.task_id, "status": made.status, "created": made.created}
    return Answer(said, 202 if made.created else 200, {"Location": f"{location}{made.task_id}"})
