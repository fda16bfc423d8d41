"""Log in with the token of the API, or with a link that works once; log out.

The page of a link has a button and nothing happens before it is pressed, so a program that looks at the link does not
use it up. The code of the link is taken out of the request before it can be logged. Before there is a session, the
form's token belongs to a cookie of its own.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.tokens import Unauthenticated
from console import sessions
from console.door import PREFIX
from console.failed_logins import FailedLogins
from console.pages import render
from console.visitors import (
    MOST_FIELDS,
    SESSION,
    cookie_name,
    find_visitor,
    forget_cookie,
    is_form_token,
    require_form,
    require_own_origin,
    set_cookie,
)
from models.engine import engine

LOGIN_FORM: Final = "celeriac_console_form"
LOGIN_FORM_SECONDS: Final = 3600
_COOKIE: Final = re.compile(r"[A-Za-z0-9_-]{43}")
EXPIRED: Final = "This page was open for too long. Please log in again."
TOO_MANY: Final = "Too many attempts have failed. Wait a minute, then try again."
UNKNOWN: Final = "This token is not valid. It may be misspelt, revoked or expired."
USED: Final = "This link is not valid any more: it works once, for ten minutes."

failed_logins: Final = FailedLogins()


async def show(request: Request) -> Response:
    """Show the form. With the code of a link, it has only a button."""
    code = _take_code(request)
    if not code and await find_visitor(request):
        return RedirectResponse(PREFIX, status_code=303)
    return _form(request, code=code)


async def log_in(request: Request) -> Response:
    """Begin a session, and go to the overview."""
    require_own_origin(request.headers)
    form = await request.form(max_files=0, max_fields=MOST_FIELDS)
    code, secret = (str(form.get(name, "")).strip() for name in ("code", "token"))
    key = request.cookies.get(cookie_name(request, LOGIN_FORM), "")
    if not key or not is_form_token(form, sessions.form_token(key)):
        return _form(request, code=code, complaint=EXPIRED, status=403)
    caller = request.client.host if request.client else ""
    if failed_logins.are_too_many(caller):
        return _form(request, code=code, complaint=TOO_MANY, status=429)

    def begin() -> str:
        if code:
            return sessions.log_in_by_link(engine(), code)
        return sessions.log_in(engine(), secret)

    try:
        session = await call_ledger(begin)
    except Unauthenticated:
        failed_logins.add(caller)
        return _form(request, complaint=USED if code else UNKNOWN, status=403)
    await _end_session(request)
    response = RedirectResponse(PREFIX, status_code=303)
    set_cookie(response, request, SESSION, session, seconds=sessions.SESSION_HOURS * 3600)
    forget_cookie(response, request, LOGIN_FORM)
    return response


async def log_out(request: Request) -> Response:
    """End the session, and go to the login page."""
    await require_form(request)
    await _end_session(request)
    response = RedirectResponse(f"{PREFIX}/login", status_code=303)
    forget_cookie(response, request, SESSION)
    return response


async def _end_session(request: Request) -> None:
    session = request.cookies.get(cookie_name(request, SESSION))
    if session is None:
        return

    def end() -> None:
        with engine().begin() as connection:
            sessions.log_out(connection, session)

    await call_ledger(end)


def _form(request: Request, *, code: str = "", complaint: str = "", status: int = 200) -> Response:
    key = request.cookies.get(cookie_name(request, LOGIN_FORM), "")
    if not _COOKIE.fullmatch(key):  # otherwise a form in another tab would become invalid
        key = secrets.token_urlsafe(32)
    values = {"code": code, "complaint": complaint, "form_token": sessions.form_token(key)}
    response = render(request, "login.html", values, status=status)
    set_cookie(response, request, LOGIN_FORM, key, seconds=LOGIN_FORM_SECONDS)
    return response


def _take_code(request: Request) -> str:
    """Return the code of a link, and remove it from the request: the server logs the address after the response."""
    code = request.query_params.get("code", "")
    request.scope["query_string"] = b""
    return code


ROUTES: Final = [
    Route(f"{PREFIX}/login", show, methods=["GET"]),
    Route(f"{PREFIX}/login", log_in, methods=["POST"]),
    Route(f"{PREFIX}/logout", log_out, methods=["POST"]),
]
