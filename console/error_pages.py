"""The pages for errors, and the security headers of every response. `api/error_middleware.py` sends them.

A visitor who is not logged in is sent to the login page. An unexpected error is logged with its traceback, and the page
says only that there was one; so it is with the addresses of servers that do not answer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.errors import NotFound
from console.door import PREFIX
from console.pages import render
from console.visitors import LoginNeeded
from models.database_errors import translate
from models.errors import CeleriacError, Unreachable
from settings import SettingsError

logger = logging.getLogger(__name__)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",  # with `no-referrer`, browsers send `Origin: null` with our own forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class ErrorText:
    """What a page says about an error."""

    status: int
    heading: str
    sentence: str
    remedy: str = ""


NO_LEDGER: Final = ErrorText(
    503,
    "The ledger does not answer",
    "PostgreSQL is unreachable or busy, so there is nothing to show.",
    "No task is lost: workers wait, too. `manage.py check` says which server does not answer.",
)
FAILED: Final = ErrorText(
    500, "Something went wrong", "The page could not be made.", "The log of the API has the details."
)


async def handle_error(request: Request, error: Exception) -> Response:
    """Handle the errors that Starlette would otherwise answer as plain text."""
    return response_to(error, request)


def response_to(error: Exception, request: Request) -> Response:
    """Return the page for any error, and log it if the visitor cannot be told everything."""
    match translate(error) or error:
        case LoginNeeded():
            return RedirectResponse(f"{PREFIX}/login", status_code=303)
        case HTTPException(status_code=404):
            text = ErrorText(404, "There is no such page", "The address is misspelt, or the page has moved.")
        case HTTPException() as refused:
            text = ErrorText(refused.status_code, refused.detail, "The console does not do this.")
        case Unreachable() | SettingsError() as unreachable:
            logger.warning("%s", unreachable.message, extra={"event": "request_unavailable"})
            text = NO_LEDGER
        case CeleriacError() as known if known.http_status != CeleriacError.http_status:
            text = ErrorText(known.http_status, _heading(known), known.message, known.remedy)
        case _:
            logger.error("A page of the console failed.", exc_info=error, extra={"event": "request_failed"})
            text = FAILED
    return render(request, "error.html", {"error": text}, status=text.status)


def _heading(error: CeleriacError) -> str:
    if isinstance(error, NotFound):
        return "There is no such page"
    headings = {403: "Not allowed", 404: "Not found", 413: "Too large", 429: "Too many attempts"}
    return headings.get(error.http_status, "That did not work")
