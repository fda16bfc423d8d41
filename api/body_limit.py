"""How much a client may send. Starlette takes any amount: this stops it before it is parsed, spooled or kept.

A length that is declared is believed if it is too large; otherwise the bytes are counted as they come, so a client that
declares none, or lies, gets no further. Depth, keys and NUL are the envelope's business: `outbox/canonical.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.errors import Misuse


class BodyTooLarge(Misuse):
    """The body is too large."""

    code = "body_too_large"
    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is too large: {limit:,} bytes is the most that is taken here.")


class BodyLimit:
    """`limits` are those of single addresses, asked for each request; `limit` is that of all others."""

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
        if _declared(Headers(scope=scope)) > limit:
            raise BodyTooLarge(limit)
        counted = _Counted(receive, send, limit)
        await self.app(scope, counted.receive, counted.send)


class _Counted:
    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._taken = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._taken += len(message.get("body", b""))
            self._refuse_too_much()
        return message

    async def send(self, message: Message) -> None:
        self._refuse_too_much()  # whoever caught our refusal while it parsed would answer something else
        await self._send(message)

    def _refuse_too_much(self) -> None:
        if self._taken > self._limit:
            raise BodyTooLarge(self._limit)


def _declared(headers: Headers) -> int:
    """Nonsense is the server's to refuse, and it does; a number too long to be read is large."""
    given = headers.get("content-length", "")
    return int(given[:20]) if given.isascii() and given.isdecimal() else 0
