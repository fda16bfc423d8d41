"""A TCP proxy in front of a real server: it delays answers, drops data or closes connections at a moment of the test.

The moment is when a given text from the publisher passes the proxy.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from urllib.parse import urlsplit

Pump = Callable[[socket.socket, socket.socket], None]


class Then(Enum):
    """What the proxy does at the moment."""

    ANSWER = auto()
    LOSE = auto()
    HANG_UP = auto()


class Proxy:
    """A proxy that listens at `url`. It has one thread for each direction of each connection."""

    def __init__(self, server: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(server)
        self._server = (parts.hostname or "", parts.port or 0)
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = server.replace(f":{parts.port}", f":{self.port}")
        self._open: list[socket.socket] = []
        self._moment = b""
        self._then = Then.ANSWER
        self._answers_may_pass = threading.Event()
        self._answers_may_pass.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_answers_until(self, text: str) -> None:
        """Delay the answers of the server until this text has passed."""
        self._wait_for(text, Then.ANSWER)

    def lose_everything_from(self, text: str) -> None:
        """Drop this text and all that follows. Pass on the answers to what came before, then close."""
        self._wait_for(text, Then.LOSE)

    def hang_up_at(self, text: str) -> None:
        """Close the connection when this text has passed, without an answer."""
        self._wait_for(text, Then.HANG_UP)

    def hang_up(self) -> None:
        while self._open:
            end(self._open.pop())

    def close(self) -> None:
        self._answers_may_pass.set()
        end(self._listening)
        self.hang_up()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            near = self._tls.wrap_socket(client, server_side=True) if self._tls else client
        except OSError:  # the client does not trust our certificate
            client.close()
            return
        far = socket.create_connection(self._server)
        self._open += [near, far]
        for pump, source, target in ((self._pass_on, near, far), (self._answer, far, near)):
            threading.Thread(target=_until_the_end, args=(pump, source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        seen = b""
        while data := source.recv(65536):
            seen = seen[-100:] + data
            if not self._moment or self._moment not in seen:
                target.sendall(data)
                continue
            target.sendall(data.partition(self._moment)[0] if self._then is Then.LOSE else data)
            if self._then is Then.HANG_UP:
                return
            self._answers_may_pass.set()
            if self._then is Then.LOSE:
                while source.recv(65536):
                    pass
            self._moment = b""

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            is_the_last = self._then is Then.LOSE
            self._answers_may_pass.wait(30)
            target.sendall(data)
            if is_the_last:
                return

    def _wait_for(self, text: str, then: Then) -> None:
        self._moment, self._then = text.encode(), then
        self._answers_may_pass.clear()


@contextmanager
def proxy_of(server: str, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    proxy = Proxy(server, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _until_the_end(pump: Pump, source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError, ValueError):
        pump(source, target)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
