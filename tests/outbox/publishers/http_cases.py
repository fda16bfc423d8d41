"""The webhook publisher and its receiver: a real HTTP server whose behaviour each test defines."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outbox.publishers.address_guard import Resolve
from outbox.publishers.signed_post import Patience
from outbox.publishers.webhook import HttpPublisher
from tests.outbox.publishers.case import Case

IMPATIENT = Patience(connect_seconds=0.5, request_seconds=0.5)
# For tests in which no time limit may be exceeded, even on a slow machine.
PATIENT = Patience(connect_seconds=60, request_seconds=60, batch_seconds=60, keep_seconds=60)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the receiver got, and its connection."""

    target: str
    headers: Message
    body: bytes
    connection: int

    @property
    def name(self) -> Any:
        """The name that was given to `events`."""
        return json.loads(self.body)["ids"][0]


class Exchange(BaseHTTPRequestHandler):
    """A connection of the receiver, on which a test's behaviour answers."""

    protocol_version = "HTTP/1.1"
    server: Receiver
    request_: Request

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.request_ = Request(self.path, self.headers, body, self.client_address[1])
        self.server.requests.append(self.request_)
        self.server.behaviour(self)

    def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def say(self, raw: bytes) -> None:
        """Send raw bytes, then close the connection."""
        self.wfile.write(raw)
        self.close_connection = True

    def drip(self, raw: bytes, drop: bytes) -> None:
        """Send raw bytes, then a little at a time until the client closes the connection."""
        self.close_connection = True
        try:
            self.wfile.write(raw)
            while not self.server.is_closing.wait(0.01):
                self.wfile.write(drop)
        except OSError:
            self.server.hang_ups.release()

    def hang(self) -> None:
        self.close_connection = True
        self.server.is_closing.wait()


def answer_ok(exchange: Exchange) -> None:
    exchange.answer()


class Receiver(ThreadingHTTPServer):
    """A server that remembers webhooks and answers as the test defines."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__((host, port), Exchange)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.requests: list[Request] = []
        self.behaviour: Callable[[Exchange], None] = answer_ok
        self.is_closing = threading.Event()
        self.hang_ups = threading.Semaphore(0)
        self.connections = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @contextmanager
    def behaving(self, behaviour: Callable[[Exchange], None]) -> Iterator[None]:
        self.behaviour, before = behaviour, self.behaviour
        try:
            yield
        finally:
            self.behaviour = before

    def end(self) -> None:
        self.is_closing.set()
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        taken = super().get_request()
        self.connections += 1
        return taken

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that closed its connection is not an error
            super().handle_error(request, client_address)


@contextmanager
def receiving(host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver(host, port, tls)
    try:
        yield receiver
    finally:
        receiver.end()


def resolving(*answers: list[str] | OSError) -> Resolve:
    """Return a name server that gives these answers one after the other, and then repeats the last one."""
    left = list(answers)

    def resolve(host: str, port: int) -> list[str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    return resolve


@dataclass
class Hooks:
    """A receiver, and publishers that are closed at the end of the test."""

    receiver: Receiver
    opened: list[HttpPublisher] = field(default_factory=list)

    def publisher(self, url: str | None = None, **options: Any) -> HttpPublisher:
        ours = {"secret": None, "allow_private": True, "allow_http": True, "patience": PATIENT}
        self.opened.append(HttpPublisher(url or self.receiver.url, **(ours | options)))
        return self.opened[-1]


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    with receiving() as receiver:
        made = Hooks(receiver)
        yield made
        for publisher in made.opened:
            publisher.close()


@pytest.fixture
def http(hooks: Hooks) -> Case:
    publisher = hooks.publisher()

    @contextmanager
    def hanging() -> Iterator[None]:
        publisher.patience = IMPATIENT  # only while the server hangs
        with hooks.receiver.behaving(Exchange.hang):
            yield
        publisher.patience = PATIENT

    return Case(
        publisher,
        lambda: hooks.publisher("http://127.0.0.1:1/"),
        hanging,
        lambda: [request.name for request in hooks.receiver.requests],
        keeps_order=False,
    )
