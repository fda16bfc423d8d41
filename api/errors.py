"""From an error to its answer. Its status is its own (`models/errors.py`); this says what a client may hear of it.

A failure of ours is logged with its traceback, and the client hears that there was one. Who is away and where, is for
the log too: a client is told that the ledger is away, not at which address.
"""

from __future__ import annotations

import logging
from typing import Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from api.json_responses import Answer, refusal
from models.database_errors import meaning
from models.errors import CeleriacError, Misuse, Unreachable
from settings import SettingsError
from tasks.submission.submit import IdempotencyConflict

logger = logging.getLogger(__name__)

AWAY: Final = "The ledger cannot be reached. Ask again: with the same Idempotency-Key nothing is submitted twice."
FAILED: Final = "Something went wrong here, and the log of the API says what."
HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
# What Starlette itself refuses.
PLAIN: Final = {
    404: ("not_found", "There is nothing at this address."),
    405: ("method_not_allowed", "This address knows other methods: see the header Allow."),
}


def answer_of(error: Exception) -> Answer:
    """Whatever was raised."""
    match meaning(error) or error:
        case HTTPException() as refused:
            code, message = PLAIN.get(refused.status_code, (Misuse.code, str(refused.detail)))
            return refusal(refused.status_code, code, message, headers=refused.headers)
        case RequestValidationError() as invalid:
            return refusal(Misuse.http_status, Misuse.code, _said(invalid))
        case (CeleriacError() | SettingsError()) as ours if ours.http_status != CeleriacError.http_status:
            return _refused(ours)
    logger.error("a request failed", exc_info=error)
    return refusal(CeleriacError.http_status, CeleriacError.code, FAILED)


async def answer_to(_request: Request, error: Exception) -> Answer:
    """For the two kinds that FastAPI would otherwise answer in a shape of its own."""
    return answer_of(error)


def _refused(error: CeleriacError | SettingsError) -> Answer:
    message = error.message
    if isinstance(error, Unreachable | SettingsError):
        logger.warning("%s", message)
        message = AWAY
    details = {"taskId": error.task_id} if isinstance(error, IdempotencyConflict) else {}
    return refusal(error.http_status, error.code, message, headers=HEADERS.get(error.http_status), **details)


def _said(invalid: RequestValidationError) -> str:
    """What is wrong and where; never what was given."""
    first = invalid.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return f"{place}: {first['msg']}." if place else f"{first['msg']}."
