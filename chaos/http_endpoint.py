"""An HTTP service that performs one effect per Idempotency-Key, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self

HOST: Final = "127.0.0.1"
KEY: Final = "Idempotency-Key"
KEYS: Final = "/keys"
_direct: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback


class HttpEndpoint:
    """POST performs an effect; GET lists all effects. It forks: a thread here could hold a lock while others fork."""

    port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/effects"

    def start(self) -> None:
        """Start it; on the same port if it was started before, and without its effects."""
        with socket.create_server((HOST, self.port), backlog=128) as listening:
            self.port = listening.getsockname()[1]
            self._pid = os.fork()
            if self._pid == 0:
                _serve(listening)

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def effects(self) -> list[str]:
        """Return what was posted with each key."""
        return _read(self.url)

    def posted_keys(self) -> list[str]:
        """Return the key of every POST since the start; a repeated POST repeats its key."""
        return _read(f"http://{HOST}:{self.port}{KEYS}")


def _read(url: str) -> list[str]:
    with _direct.open(url, timeout=10) as answer:
        return list(json.load(answer))


def _serve(listening: socket.socket) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our parent ends us
        server = _Server((HOST, 0), _Exchange, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        server.serve_forever()
    finally:
        os._exit(1)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Print nothing: clients are killed."""


_effects: Final[dict[str, str]] = {}  # by key
_posted_keys: Final[list[str]] = []


class _Exchange(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _posted_keys.append(self.headers[KEY])
        self._answer(_effects.setdefault(self.headers[KEY], json.loads(body)))

    def do_GET(self) -> None:
        self._answer(_posted_keys if self.path == KEYS else list(_effects.values()))

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, value: object) -> None:
        written = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)
