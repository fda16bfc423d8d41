"""The outermost middleware of the API and the console: answer every error, and add security headers to every response.

It wraps the token check and the body limit, so their errors have the same shape as all others. No exception reaches
Starlette's own handler, which would log it and raise it again into the server, which logs it a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
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
    """`headers` and `answer` replace those of the API: the console answers with pages."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        headers: Mapping[str, str] = SECURITY_HEADERS,
        answer: Callable[[Exception, Request], Response] = lambda error, _: response_to(error),
    ) -> None:
        self.app = app
        self.headers = headers
        self.answer = answer

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
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            logger.debug("A client disconnected before its request was read.", extra={"event": "client_disconnected"})
        except Exception as error:
            response = self.answer(error, Request(scope))
            if has_started:
                raise  # the response is half sent: the server closes the connection
            await response(scope, receive, send_with_headers)
