"""Who may open a WebSocket. A handshake is refused before it is complete, with the same JSON errors as HTTP requests.

path          one of the routes that the application names; others do not exist
Origin        none (the client is no browser), the host that the request is addressed to, or one of RECEIPT_ORIGINS
token         in the header `Authorization: Bearer`; or, as browsers cannot send that header, as a subprotocol
              `celeriac.bearer.TOKEN` beside the one of the route. Never in the address, which is logged
scope         the token must have the one that the route names
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import settings
from api import tokens
from api.authorization import bearer_token
from api.error_middleware import SECURITY_HEADERS
from api.errors import NotFound, response_to
from api.tokens import Forbidden, Token, Unauthenticated
from api.websocket_protocol import BEARER

logger = logging.getLogger(__name__)

POLICY_VIOLATION: Final = 1008
INTERNAL_ERROR: Final = 1011
DENIAL: Final = "websocket.http.response"  # the ASGI extension for responses other than 101
PORTS: Final = {"http": 80, "https": 443}

Authenticate = Callable[[str], Awaitable[Token]]


class ForeignOrigin(Forbidden):
    """Pages of this origin may not open WebSockets here.

    A browser sent an Origin header that names another site than the API itself.
    """

    code = "foreign_origin"
    remedy = "Add the origin, such as https://app.example.com, to RECEIPT_ORIGINS."


@dataclass(frozen=True, slots=True)
class Visitor:
    """The client of a handshake that may be completed. `check_again` returns the token as it is now, or raises."""

    token: Token
    subprotocol: str | None
    check_again: Callable[[], Awaitable[Token]]


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """What serves a path. `serve` may still raise an error before it accepts."""

    serve: Callable[[Scope, Receive, Send, Visitor], Awaitable[None]]
    scope: tokens.Scope
    subprotocol: str


class WebSocketDoor:
    """Middleware that serves WebSockets, after checking who opens them. Everything else goes to the application."""

    def __init__(self, app: ASGIApp, *, routes: Mapping[str, WebSocketRoute], authenticate: Authenticate) -> None:
        self.app = app
        self.routes = routes
        self.authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        is_accepted = False

        async def note_and_send(message: Message) -> None:
            nonlocal is_accepted
            is_accepted |= message["type"] == "websocket.accept"
            await send(message)

        try:
            route = self.routes.get(scope["path"])
            if route is None:
                raise NotFound
            await route.serve(scope, receive, note_and_send, await self._admit(scope, route))
        except Exception as error:
            if is_accepted:
                logger.exception("A WebSocket failed.", extra={"event": "websocket_failed"})
                await send({"type": "websocket.close", "code": INTERNAL_ERROR})
            else:
                await _deny(error, scope, receive, send)

    async def _admit(self, scope: Scope, route: WebSocketRoute) -> Visitor:
        headers = Headers(scope=scope)
        require_origin(headers)
        offered = [name.strip() for each in headers.getlist("sec-websocket-protocol") for name in each.split(",")]
        secret = _secret(headers, offered, route.subprotocol)

        async def check() -> Token:
            token = await self.authenticate(secret)
            if not token.has_scope(route.scope):
                raise Forbidden(f"The token {token.name} lacks the scope {route.scope}.")
            return token

        return Visitor(await check(), route.subprotocol if route.subprotocol in offered else None, check)


def require_origin(headers: Headers) -> None:
    """Raise ForeignOrigin for a page of another site."""
    origins = headers.getlist("origin")
    if not origins:
        return
    listed = {_normal(each) for each in settings.current().receipt_origins}
    if len(origins) > 1 or (
        _normal(origins[0]) not in listed and not is_own_origin(origins[0], headers.get("host", ""))
    ):
        raise ForeignOrigin


def is_own_origin(origin: str, host: str) -> bool:
    """Return True if the origin has the host and port of the request. A proxy may have changed the scheme."""
    scheme = origin.lower().partition("://")[0]
    return scheme in PORTS and _normal(origin) == _normal(f"{scheme}://{host}")


def _normal(origin: str) -> str:
    """Return an origin in one of its notations: lower case, without the default port."""
    scheme, _, place = origin.lower().rstrip("/").partition("://")
    return f"{scheme}://{place.removesuffix(f':{PORTS[scheme]}') if scheme in PORTS else place}"


def _secret(headers: Headers, offered: list[str], subprotocol: str) -> str:
    """Return the token, which must be given once."""
    given = [name.removeprefix(BEARER) for name in offered if name.startswith(BEARER)]
    if not given:
        return bearer_token(headers)
    if "authorization" in headers or len(given) > 1:
        raise Unauthenticated("Send one token: in the header Authorization, or as a subprotocol.")
    if subprotocol not in offered:
        raise Unauthenticated(f"Offer the subprotocol {subprotocol} beside the token; the server must select one.")
    return given[0]


async def _deny(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a handshake."""
    response = response_to(error)
    if DENIAL not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    await response(scope, receive, send)
