"""The outermost layer: every error becomes an answer, and every answer forbids guessing, framing and keeping.

It stands outside of the gate and the body limit, so theirs are answered like any other. Starlette's own last resort
would log a failure and then raise it into the server, which logs it once more; nothing gets that far.
"""

from __future__ import annotations

import logging
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import answer_of

logger = logging.getLogger(__name__)

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Answering:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except ClientDisconnect:
            logger.debug("a client left before its request was read")
        except Exception as error:
            answer = answer_of(error)
            if started:
                raise  # half an answer cannot be taken back: the server closes the connection
            await answer(scope, receive, sent)
