"""How large a request body may be. Starlette has no limit; this one applies before a body is parsed, spooled or kept.

A request with both Content-Length and Transfer-Encoding is rejected: a proxy that believes the other header would see
two requests where we see one (request smuggling). A declared length that is too large is rejected at once. Otherwise
the bytes are counted as they arrive, so a missing or false length does not help a client. `outbox/canonical_json.py`
limits depth, number of keys and stored size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import BadRequest
from models.errors import Misuse


class BodyTooLarge(Misuse):
    """The request body is too large.

    A body may have 4 MiB; an upload may have DOCUMENT_MAX_BYTES and 64 KiB for the multipart headers.
    """

    code = "body_too_large"
    remedy = "Send less in one request. For larger documents, raise DOCUMENT_MAX_BYTES."
    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is too large: the limit is {limit:,} bytes.")


class OneLength:
    """Middleware that rejects requests with two statements about the length of their body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if "transfer-encoding" in headers and "content-length" in headers:
                raise BadRequest("The request has both Content-Length and Transfer-Encoding; send only one of them.")
        await self.app(scope, receive, send)


class BodyLimit:
    """Middleware. `limits` holds the limits of single paths, read for each request; `limit` is that of all others."""

    def __init__(self, app: ASGIApp, *, limit: int, limits: Mapping[str, Callable[[], int]]) -> None:
        self.app = app
        self.limit = limit
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        special = self.limits.get(scope["path"])
        limit = special() if special else self.limit
        if _declared_length(Headers(scope=scope)) > limit:
            raise BodyTooLarge(limit)
        counted = _CountedBody(receive, send, limit)
        await self.app(scope, counted.receive, counted.send)


class _CountedBody:
    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._received = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._check()
        return message

    async def send(self, message: Message) -> None:
        self._check()  # a parser that caught BodyTooLarge would send a response of its own
        await self._send(message)

    def _check(self) -> None:
        if self._received > self._limit:
            raise BodyTooLarge(self._limit)


def _declared_length(headers: Headers) -> int:
    """Return the Content-Length, or 0 if there is none. The server rejects malformed ones itself.

    Twenty digits are enough to exceed every limit; more would make `int` slow.
    """
    declared = headers.get("content-length", "")
    return int(declared[:20]) if declared.isascii() and declared.isdecimal() else 0
