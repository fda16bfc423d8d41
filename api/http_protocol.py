"""HTTP connections: uvicorn's protocol, with a time limit for every request and errors in JSON.

uvicorn waits for ever for the rest of a request, so a client that opens connections and sends nothing, or a byte now
and then, would use up the file descriptors of the server. Here

    the head of a request    must arrive within HEAD_SECONDS
    the body                 must arrive within BODY_SECONDS, and a second more per LEAST_BYTES_PER_SECOND bytes
    the rest of a body       must arrive within REST_SECONDS once the request was answered
    too many connections     without a complete head: the oldest one is closed for each new one
    an answer                that the client does not read for UNREAD_SECONDS: the connection is cut

A request that takes longer is answered 408. When the server stops, streams of events end. Start the API with
`uvicorn --http api.http_protocol:GuardedProtocol`, as the embedded stack and docker-compose.yml do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from api.error_middleware import SECURITY_HEADERS
from api.errors import BadRequest, RequestTimeout, response_to
from api.event_streams import end_streams
from models.errors import CeleriacError

logger = logging.getLogger(__name__)

HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0
REST_SECONDS: Final = 5.0
UNREAD_SECONDS: Final = 30.0
LEAST_BYTES_PER_SECOND: Final = 16_384
MOST_WITHOUT_HEAD: Final = 1000  # more than clients that reconnect at once after a restart


class GuardedProtocol(H11Protocol):
    """One connection. `_turn` is what the server waits for: a state of the client in h11, and the current request."""

    _without_head: ClassVar[dict[GuardedProtocol, None]] = {}  # oldest first

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._turn: tuple[object, object] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_websocket = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(len(data))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self._turn is not None and self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._deadline = min(self._deadline, self.loop.time() + REST_SECONDS)
            self._start_timer()

    def pause_writing(self) -> None:
        """Start the clock when the buffer is full, because the client does not read."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        end_streams(self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_watching()
        self._is_websocket = True  # from now on, `websocket_protocol.py` watches the connection
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer a request that h11 cannot parse."""
        self._refuse(BadRequest())

    def _watch(self, received: int = 0) -> None:
        """Start the clock when it is the client's turn to send, and stop it when the request is complete."""
        if self._is_websocket:
            return
        state = self.conn.their_state
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watching()
            return
        if self._turn != (turn := (state, self.cycle)):
            self._stop_watching()
            self._turn = turn
            self._deadline = self.loop.time() + (HEAD_SECONDS if state is h11.IDLE else BODY_SECONDS)
            self._start_timer()
            if state is h11.IDLE:
                self._join_those_without_head()
        elif state is h11.SEND_BODY and not self.cycle.response_complete:
            self._deadline += received / LEAST_BYTES_PER_SECOND

    def _stop_watching(self) -> None:
        self._turn = None
        self._without_head.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:  # the application does not read; that is not the client's fault
            self._deadline = now + BODY_SECONDS
        if now < self._deadline:
            self._start_timer()
        else:
            self._refuse(RequestTimeout())

    def _join_those_without_head(self) -> None:
        self._without_head[self] = None
        if len(self._without_head) > MOST_WITHOUT_HEAD:
            oldest = next(iter(self._without_head))
            logger.warning(
                "More than %d connections sent no request; the oldest one is closed.",
                MOST_WITHOUT_HEAD,
                extra={"event": "connections_refused"},
            )
            oldest._stop_watching()
            oldest.transport.close()

    def _refuse(self, error: CeleriacError) -> None:
        """Answer with an error, if no answer was begun and the client has sent anything, and close the connection."""
        self._stop_watching()
        is_silent = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not is_silent:
            if self.cycle is not None:
                self.cycle.disconnected = True  # the application must not answer, too
            self._send(error)
        self.transport.close()

    def _send(self, error: CeleriacError) -> None:
        response = response_to(error)
        for name, value in {**SECURITY_HEADERS, "Connection": "close"}.items():
            response.headers.setdefault(name, value)
        events = [
            h11.Response(
                status_code=response.status_code,
                headers=response.raw_headers,
                reason=STATUS_PHRASES[response.status_code],
            ),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ]
        try:
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:  # a body in answer to HEAD
            logger.debug("A request was refused without an answer.", exc_info=True, extra={"event": "request_refused"})
