"""The API behind a real server."""

from __future__ import annotations

import socket
import threading

import uvicorn

from api.app import app
from api.http_protocol import GuardedProtocol
from api.websocket_protocol import GuardedWebSocket
from tests.servers import wait_until


class Server:
    """uvicorn in a thread of this process."""

    def __init__(self) -> None:
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                port=0,
                http=GuardedProtocol,
                ws=GuardedWebSocket,
                ws_max_size=1_048_576,
                ws_per_message_deflate=False,
                log_config=None,
                log_level="trace",
                lifespan="on",  # it closes the connections of this event loop
            )
        )
        self.thread = threading.Thread(target=self.uvicorn.run)

    def start(self) -> None:
        self.thread.start()
        wait_until(lambda: self.uvicorn.started, "uvicorn listens", seconds=20)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join()

    @property
    def port(self) -> int:
        return int(self.uvicorn.servers[0].sockets[0].getsockname()[1])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)
