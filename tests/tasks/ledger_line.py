"""A connection to the ledger that a test can break at a chosen statement."""

from __future__ import annotations

import socket

from tests.outbox.publishers.proxy import Proxy


class Line(Proxy):
    """A proxy for the ledger that breaks a connection at a given text: before the server gets it, or its answer."""

    def __init__(self, server: str) -> None:
        self._cut_at: bytes | None = None
        self.is_down = False
        self._answer_is_lost = self._must_answer = False
        super().__init__(server)

    def go_down(self) -> None:
        """Break all connections and accept no new one, as a server that restarts does."""
        self.is_down = True
        self.hang_up()

    def _connect(self, client: socket.socket) -> None:
        if self.is_down:
            client.close()
        else:
            super()._connect(client)

    def cut_at(self, words: str, *, but_it_arrives: bool) -> None:
        self._cut_at, self._must_answer = words.encode(), but_it_arrives

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if self._cut_at and self._cut_at in data:
                self._cut_at = None
                if not self._must_answer:
                    return
                self._answer_is_lost = True
            target.sendall(data)

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if self._answer_is_lost:
                self._answer_is_lost = False
                return
            target.sendall(data)
