"""A TCP proxy on loopback, in front of PostgreSQL or Redis, that loses a reply, a request or a connection on purpose.

    with FaultProxy(url) as proxy:                       # give proxy.url to the code under test
        proxy.arm(Fault.LOSE_REPLY, COMMIT_PREPARED)     # the server executes it, the client never learns that
        …
        assert proxy.strikes                             # a fault that never struck proves nothing

There is one rule at a time. It acts on the n-th statement that matches, whichever connection sends it, and then it is
used up. `LOSE_REPLY` waits for the whole reply before it resets the connection, so the statement has been executed;
the reply is kept in the `Strike`. Of requests that are sent together (pipelining), all replies are lost.

`proxy.delay(COMMIT, 0.02)` makes every commit slow: each statement that matches reaches the server so much later, until
another delay is set. `slow_commits.py` runs such a proxy as a program.

Each connection has a thread of its own, and no other thread touches its sockets.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self
from urllib.parse import urlsplit

from chaos.conversations import Conversation, PostgresConversation, RedisConversation

COMMIT: Final = rb"COMMIT\s*;?$"
BEGIN: Final = rb"BEGIN"
PREPARE_TRANSACTION: Final = rb"PREPARE TRANSACTION"
COMMIT_PREPARED: Final = rb"COMMIT PREPARED"
ROLLBACK_PREPARED: Final = rb"ROLLBACK PREPARED"
EVALSHA: Final = rb"EVALSHA "

CHUNK: Final = 65536
HOST: Final = "127.0.0.1"
CLOSE_SECONDS: Final = 5.0
RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


class Fault(StrEnum):
    """What happens to a statement."""

    LOSE_REPLY = "lose_reply"  # it is executed, its reply is swallowed, and the connection is reset
    RESET = "reset"  # the connection is reset before the server gets it
    SILENCE = "silence"  # the server does not get it, and the connection stays open without a word


@dataclass(frozen=True, slots=True)
class Strike:
    """A statement that a fault has struck, and the reply that was swallowed."""

    fault: Fault
    statement: bytes
    reply: bytes = b""


@dataclass(slots=True)
class _Rule:
    fault: Fault
    pattern: re.Pattern[bytes]
    passes_left: int


class FaultProxy:
    """A proxy that listens at `url`, which is the address of the server with another port."""

    def __init__(self, server: str) -> None:
        address = urlsplit(server)
        self._server = (address.hostname or HOST, address.port or 0)
        is_redis = address.scheme.startswith("redis")
        self._conversation: type[Conversation] = RedisConversation if is_redis else PostgresConversation
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = server.replace(f":{address.port}", f":{self.port}")
        self.strikes: list[Strike] = []
        self._rule: _Rule | None = None
        self._delay: tuple[re.Pattern[bytes], float] | None = None
        self._lock = threading.Lock()
        self._struck = threading.Event()
        self._sockets: set[socket.socket] = {self._listening}
        self._stop, self._is_stopping = socket.socketpair()  # readable when the proxy is closed
        self._threads = [threading.Thread(target=self._accept, name="fault-proxy", daemon=True)]
        self._threads[0].start()
        _proxies.add(self)

    def arm(self, fault: Fault, pattern: bytes, *, nth: int = 1) -> None:
        """Let the n-th statement from now on that begins like this suffer the fault. Replaces an earlier rule."""
        with self._lock:
            self._struck.clear()
            self._rule = _Rule(fault, re.compile(pattern, re.IGNORECASE), nth - 1)

    def delay(self, pattern: bytes, seconds: float) -> None:
        """Let every statement from now on that begins like this reach the server so much later. 0 ends this."""
        self._delay = (re.compile(pattern, re.IGNORECASE), seconds) if seconds else None

    def disarm(self) -> None:
        """Let everything pass. A connection that has fallen silent stays so."""
        with self._lock:
            self._rule = None

    def wait_until_struck(self, seconds: float = 10.0) -> Strike:
        """Wait for the fault, and return what it has struck."""
        if not self._struck.wait(seconds):
            raise TimeoutError(f"not within {seconds:g} s: a statement that the fault strikes")
        return self.strikes[-1]

    def close(self) -> None:
        """Reset all connections and stop listening."""
        self._stop.close()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._listening.close()
        self._is_stopping.close()
        _proxies.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._is_stopping, selectors.EVENT_READ)
            while self._is_stopping not in _readable(selector):
                client, _ = self._listening.accept()
                thread = threading.Thread(target=self._serve, args=(client,), name="fault-proxy", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._server) as server:
            both = {client, server}
            self._sockets |= both
            try:
                _Connection(self, client, server, self._conversation()).run()
            finally:
                self._sockets -= both

    def _fault_for(self, statement: bytes | None) -> Fault | None:
        """Return the fault that this statement suffers, and use up the rule."""
        with self._lock:
            rule = self._rule
            if rule is None or statement is None or not rule.pattern.match(statement.strip()):
                return None
            if rule.passes_left:
                rule.passes_left -= 1
                return None
            self._rule = None
            return rule.fault

    def _delay_of(self, statement: bytes | None) -> float:
        delay = self._delay
        return delay[1] if delay and statement is not None and delay[0].match(statement.strip()) else 0.0

    def _note(self, strike: Strike) -> None:
        self.strikes.append(strike)
        self._struck.set()


@dataclass(slots=True)
class _Connection:
    """Passes messages between a client and the server until one of them leaves, or a fault ends the connection."""

    proxy: FaultProxy
    client: socket.socket
    server: socket.socket
    conversation: Conversation
    losing: bytes | None = None  # the statement whose reply is being swallowed
    swallowed: bytes = b""

    def run(self) -> None:
        stopping = self.proxy._is_stopping
        for one in (self.client, self.server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with selectors.DefaultSelector() as selector:
            for one in (self.client, self.server, stopping):
                selector.register(one, selectors.EVENT_READ)
            goes_on = True
            while goes_on:
                readable = _readable(selector)
                if stopping in readable:
                    self._reset()
                    return
                if self.server in readable:
                    goes_on = self._pass_reply(self.server.recv(CHUNK))
                if self.client in readable and goes_on:
                    goes_on = self._pass_requests(self.client.recv(CHUNK))

    def _pass_reply(self, reply: bytes) -> bool:
        """Return False if the connection is over."""
        answered = self.conversation.answer(reply)
        if self.losing is None:
            self.client.sendall(reply)
            return bool(reply)
        self.swallowed += reply
        if not answered or self.conversation.waiting:
            return bool(reply)
        self._reset()
        self.proxy._note(Strike(Fault.LOSE_REPLY, self.losing, self.swallowed))
        return False

    def _pass_requests(self, received: bytes) -> bool:
        """Return False if the connection is over."""
        for sent, statement in self.conversation.ask(received):
            fault = None if self.losing is not None else self.proxy._fault_for(statement)
            if fault is Fault.LOSE_REPLY:
                self.losing = statement
            elif fault:
                self.proxy._note(Strike(fault, statement or b""))
                if fault is Fault.SILENCE:
                    self.proxy._is_stopping.recv(1, socket.MSG_PEEK)  # returns when the proxy is closed
                self._reset()
                return False
            if seconds := self.proxy._delay_of(statement):
                time.sleep(seconds)
            self.server.sendall(sent)
        return bool(received)

    def _reset(self) -> None:
        """Let closing the sockets send a reset, as a host does that has lost the connection."""
        for one in (self.client, self.server):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)


def _readable(selector: selectors.BaseSelector) -> set[object]:
    return {key.fileobj for key, _ in selector.select()}


_proxies: Final[weakref.WeakSet[FaultProxy]] = weakref.WeakSet()


def _close_copies() -> None:
    """Close the sockets that a forked child has inherited: a connection is reset only when its last copy is closed."""
    for proxy in _proxies:
        for one in (*proxy._sockets, proxy._stop, proxy._is_stopping):
            one.close()


os.register_at_fork(after_in_child=_close_copies)
