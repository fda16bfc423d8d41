"""WebSocket connections: uvicorn's protocol, which also ends connections whose client no longer reads.

uvicorn closes such a connection only after everything was sent, which never happens. It would stay open, with its
buffers, until the operating system gives it up. Here

    a client that does not answer a ping    the connection is cut
    the application has ended               the rest may be sent for LINGER_SECONDS, then the connection is cut
    pings while nothing can be sent         the connection is cut, because each of them would be answered into memory

No secret reaches the log: headers are not logged, and a token that was offered as a subprotocol is only in the headers.
Start the API with `uvicorn --ws api.websocket_protocol:GuardedWebSocket`, as the embedded stack and docker-compose.yml
do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

logger = logging.getLogger(__name__)

LINGER_SECONDS: Final = 10.0
MOST_UNSENT: Final = 1_048_576  # bytes
BEARER: Final = "celeriac.bearer."  # a subprotocol that is a token


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """One connection."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.conn.debug = False  # it would log all headers
        self._linger: asyncio.TimerHandle | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):  # the handshake is valid; the application begins after this
            offered = self.scope["subprotocols"]
            self.scope["subprotocols"] = [name for name in offered if not name.startswith(BEARER)]

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > MOST_UNSENT:
            self.transport.abort()
        else:
            super().handle_ping()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # the request was not even a handshake
            self.transport.close()
        else:
            super().handle_parser_exception()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._linger = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)
