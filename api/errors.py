"""Turn an error into a response. Each error has its own status (`models/errors.py`); this decides what a client reads.

An unexpected error is logged with its traceback, and the client is told only that there was one. The address of an
unreachable server is logged too, and not sent to the client.
"""

from __future__ import annotations

import logging
from typing import Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from api.json_responses import JsonResponse, error_response
from models.database_errors import translate
from models.errors import CeleriacError, Misuse, Unreachable
from receipts.errors import ReceiptLogUnreachable
from settings import SettingsError
from tasks.submission.closed_queues import QueueClosed
from tasks.submission.json_lines import describe_invalid
from tasks.submission.submit import IdempotencyConflict

logger = logging.getLogger(__name__)

UNREACHABLE: Final = "The ledger is unreachable. Try again; with the same Idempotency-Key nothing is submitted twice."
LOG_UNREACHABLE: Final = "The receipt log is unreachable. Try again; with the same id nothing is accepted twice."
FAILED: Final = "Something went wrong; the log of the API has the details."
HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


class NotFound(CeleriacError):
    """There is nothing at this address.

    The path is misspelt, or no route has it. Paths have no trailing slash.
    """

    code = "not_found"
    remedy = "Use one of the routes in docs/api.md."
    http_status = 404


class BadRequest(Misuse):
    """The request is not valid HTTP.

    The request line or a header is malformed or too long, or a request has both Content-Length and Transfer-Encoding.
    """

    code = "bad_request"
    remedy = "Use an HTTP library; send either Content-Length or `Transfer-Encoding: chunked`."


class RequestTimeout(Misuse):
    """The request did not arrive in time.

    The client opened a connection and sent its request too slowly, or only a part of it.
    """

    code = "request_timeout"
    remedy = "Send the whole request at once: its head within 10 seconds, its body with at least 16 KiB per second."
    http_status = 408


class MethodNotAllowed(CeleriacError):
    """Method not allowed; see the Allow header.

    The path exists, but not with this method.
    """

    code = "method_not_allowed"
    remedy = "Use a method that the Allow header of the response lists."
    http_status = 405


BY_STATUS: Final[dict[int, type[CeleriacError]]] = {404: NotFound, 405: MethodNotAllowed}  # raised by Starlette itself


def response_to(error: Exception) -> JsonResponse:
    """Return the response for any error, and log it if the client cannot be told everything."""
    match translate(error) or error:
        case HTTPException() as refused:
            ours = BY_STATUS.get(refused.status_code, Misuse)
            message = ours().message if ours is not Misuse else str(refused.detail)
            return error_response(refused.status_code, ours.code, message, headers=refused.headers)
        case RequestValidationError() as invalid:
            return error_response(Misuse.http_status, Misuse.code, f"{describe_invalid(invalid.errors(), skip=1)}.")
        case (CeleriacError() | SettingsError()) as known if known.http_status != CeleriacError.http_status:
            return _response_to_known(known)
    logger.error("A request failed.", exc_info=error, extra={"event": "request_failed"})
    return error_response(CeleriacError.http_status, CeleriacError.code, FAILED)


async def handle_error(_request: Request, error: Exception) -> JsonResponse:
    """Handle the errors that FastAPI would otherwise answer in a shape of its own."""
    return response_to(error)


def _response_to_known(error: CeleriacError | SettingsError) -> JsonResponse:
    message = error.message
    if isinstance(error, Unreachable | SettingsError):
        logger.warning("%s", message, extra={"event": "request_unavailable"})
        message = LOG_UNREACHABLE if isinstance(error, ReceiptLogUnreachable) else UNREACHABLE
    details = {"taskId": error.task_id} if isinstance(error, IdempotencyConflict) else {}
    headers = HEADERS.get(error.http_status)
    if isinstance(error, BadRequest):
        headers = {"Connection": "close"}  # after a request without a certain end, the next bytes may not be a new one
    elif isinstance(error, QueueClosed):
        headers = {"Retry-After": str(error.retry_after_seconds)}
    return error_response(error.http_status, error.code, message, headers=headers, **details)
