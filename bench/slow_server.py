"""An HTTP server on loopback that answers each request after a pause, as a service somewhere else would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PAUSE_SECONDS: Final = 0.2
_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class SlowServer:
    """The server, and how many requests it has answered."""

    def __init__(self) -> None:
        self.answered = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1000)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await stop.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(PAUSE_SECONDS)
        writer.write(_ANSWER)
        await writer.drain()
        writer.close()
        self.answered += 1


@contextmanager
def slow_server() -> Iterator[SlowServer]:
    """Run the server in a thread until the end of the block."""
    server, ready, loop, stop = SlowServer(), threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(ready, stop)), name="slow-server")
    thread.start()
    try:
        ready.wait()
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
