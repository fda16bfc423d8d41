"""Who visits the console: the session cookie, the scopes of its token, and the checks of every form (CSRF).

    GET     needs a session whose token has one of the page's scopes
    POST    also comes from a page of this console (`Origin`, `Sec-Fetch-Site`), and has the form's token

The cookie is not sent along from other sites (SameSite=Strict), and no script can read it (HttpOnly). Browsers send a
cookie to every port of a host, so its name has the port: two installations on one machine do not log each other out.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import FormData, Headers
from starlette.requests import Request
from starlette.responses import Response

from api.ledger_calls import call_ledger
from api.tokens import Forbidden, Scope, Token
from api.websocket_authorization import is_own_origin
from console import sessions
from console.door import PREFIX
from models.engine import engine
from models.errors import CeleriacError

SESSION: Final = "celeriac_console"
FORM_FIELD: Final = "form_token"
MOST_FIELDS: Final = 20
READERS: Final = (Scope.OPERATE, Scope.TASKS_READ_ALL)  # of every page that shows the ledger


class LoginNeeded(CeleriacError):
    """Log in first.

    The browser has no session of the console, or its session has ended.
    """

    code = "login_needed"
    remedy = "Open /console/login, or run `manage.py console link` for a link that logs in."
    http_status = 401


class ForeignForm(Forbidden):
    """The form was not sent by a page of this console, or it is too old.

    The browser says that another site sent the form, or the form lacks the token of the session.
    """

    code = "foreign_form"
    remedy = "Load the page again and repeat what you did. A proxy in front must pass the header Host on unchanged."


@dataclass(frozen=True, slots=True)
class Visitor:
    """A browser that is logged in."""

    session: str
    token: Token

    @property
    def actor(self) -> str:
        """Return the name under which histories and audits show what the visitor did."""
        return f"console:{self.token.name}"

    @property
    def can_operate(self) -> bool:
        return self.token.has_scope(Scope.OPERATE)

    @property
    def form_token(self) -> str:
        return sessions.form_token(self.session)


async def find_visitor(request: Request) -> Visitor | None:
    """Return who is logged in, or None."""
    session = request.cookies.get(cookie_name(request, SESSION), "")

    def read() -> Token | None:
        with engine().connect() as connection:
            return sessions.find_session(connection, session)

    token = await call_ledger(read) if session else None
    return Visitor(session, token) if token else None


async def require_visitor(request: Request, *any_of: Scope) -> Visitor:
    """Return who is logged in; raise LoginNeeded, or Forbidden if the token has none of the scopes."""
    visitor = await find_visitor(request)
    if visitor is None:
        raise LoginNeeded
    request.state.visitor = visitor  # for the header of the page, also if it says that this is forbidden
    if any_of and not visitor.token.has_scope(*any_of):
        raise Forbidden(f"The token {visitor.token.name} lacks the scope {' or '.join(any_of)}.")
    return visitor


async def require_form(request: Request, *any_of: Scope, max_files: int = 0) -> tuple[Visitor, FormData]:
    """Return who sends a form, and the form; raise what `require_visitor` raises, or ForeignForm.

    A form with files must be closed.
    """
    require_own_origin(request.headers)
    visitor = await require_visitor(request, *any_of)
    form = await request.form(max_files=max_files, max_fields=MOST_FIELDS)
    if not is_form_token(form, visitor.form_token):
        await form.close()
        raise ForeignForm
    return visitor, form


def require_own_origin(headers: Headers) -> None:
    """Raise ForeignForm if the browser says that another site sent the request."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise ForeignForm
    if any(not is_own_origin(each, headers.get("host", "")) for each in headers.getlist("origin")):
        raise ForeignForm


def is_form_token(form: FormData, expected: str) -> bool:
    given = form.get(FORM_FIELD)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def cookie_name(request: Request, kind: str) -> str:
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{kind}_{port}" if port.isascii() and port.isdigit() else kind


def set_cookie(response: Response, request: Request, kind: str, value: str, *, seconds: int) -> None:
    response.set_cookie(
        cookie_name(request, kind),
        value,
        max_age=seconds,
        path=PREFIX,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def forget_cookie(response: Response, request: Request, kind: str) -> None:
    set_cookie(response, request, kind, "", seconds=0)
