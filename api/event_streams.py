"""Server-sent events: what all streams share.

A stream ends when its events do, after its time, and when the server stops; a client that wants more reconnects with
the header Last-Event-ID, as browsers do by themselves, and its token is checked again. Empty comments keep proxies from
closing a silent stream. A client that does not read is cut off by `http_protocol.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final
from weakref import WeakSet

from starlette.responses import StreamingResponse

from api.json_responses import to_json

COMMENT_SECONDS: Final = 15.0
EVENT_STREAM: Final = "text/event-stream"
_stopping: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


class EventStream(StreamingResponse):
    """Sends events as they come. `looks` yields an event, or None after a look that found nothing new."""

    media_type = EVENT_STREAM

    def __init__(self, looks: AsyncGenerator[str | None], *, seconds: float) -> None:
        super().__init__(_events(looks, seconds))


def event(data: Any, *, id: object, name: str | None = None) -> str:
    """Return one event with JSON as its data."""
    named = f"event: {name}\n" if name else ""
    return f"{named}id: {id}\ndata: {to_json(data)}\n\n"


def end_streams(loop: asyncio.AbstractEventLoop) -> None:
    """End all streams of a server that stops, within about a second."""
    _stopping.add(loop)


async def _events(looks: AsyncGenerator[str | None], seconds: float) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    sent_at, deadline = time.monotonic(), time.monotonic() + seconds
    async with aclosing(looks):
        async for found in looks:
            now = time.monotonic()
            if found is not None:
                sent_at = now
                yield found
            elif now >= deadline or loop in _stopping:
                return
            elif now - sent_at >= COMMENT_SECONDS:
                sent_at = now
                yield ":\n\n"
