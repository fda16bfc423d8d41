"""What follows a form: the browser is sent to a page, which says in one sentence what was done or why it was refused.

The sentence travels in a cookie that lives for seconds and is shown once, so loading the page again does not repeat it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.ledger_calls import call_ledger
from console.visitors import cookie_name, forget_cookie, set_cookie
from models.errors import CeleriacError, Unreachable

COOKIE: Final = "celeriac_console_said"
REFRESH: Final = "x-refresh"  # a header that our script sends
SECONDS: Final = 20
LONGEST: Final = 1000  # characters; a cookie has room for 4 KB


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence about what was done, or why it was refused."""

    text: str
    is_refusal: bool = False


def go_to(request: Request, path: str, *, say: str = "", is_refusal: bool = False) -> Response:
    """Send the browser to a page, which shows the sentence once."""
    response = RedirectResponse(path, status_code=303)
    if say:
        value = json.dumps([say if len(say) <= LONGEST else f"{say[:LONGEST]}…", is_refusal]).encode()
        set_cookie(response, request, COOKIE, base64.urlsafe_b64encode(value).decode(), seconds=SECONDS)
    return response


async def changed(request: Request, change: Callable[[], str], *, back: str) -> Response:
    """Change something in the ledger, and send the browser to a page that says what was done, or why it was refused."""
    try:
        return go_to(request, back, say=await call_ledger(change))
    except Unreachable:
        raise
    except CeleriacError as refused:
        return go_to(request, back, say=f"{refused.message} {refused.remedy}", is_refusal=True)


def read_said(request: Request) -> Said | None:
    """Return the sentence that the page is to show, if there is one.

    It is not for a page that loads itself again: that may be another tab, which would take the sentence away.
    """
    if REFRESH in request.headers:
        return None
    value = request.cookies.get(cookie_name(request, COOKIE), "")
    try:
        text, is_refusal = json.loads(base64.urlsafe_b64decode(value))
    except (ValueError, TypeError, binascii.Error):
        return None
    return Said(str(text), bool(is_refusal))


def forget_said(response: Response, request: Request) -> None:
    forget_cookie(response, request, COOKIE)
