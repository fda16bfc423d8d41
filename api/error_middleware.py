"""The outermost middleware: turn every error into a JSON response, and add security headers to every response.

It wraps the token check and the body limit, so their errors have the same shape as all others. No exception reaches
Starlette's own handler, which would log it and raise it again into the server, which logs it a second time.
"""

from __future__ import annotations

import logging
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import response_to

logger = logging.getLogger(__name__)

SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ErrorMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            logger.debug("A client disconnected before its request was read.", extra={"event": "client_disconnected"})
        except Exception as error:
            response = response_to(error)
            if has_started:
                raise  # the response is half sent: the server closes the connection
            await response(scope, receive, send_with_headers)
