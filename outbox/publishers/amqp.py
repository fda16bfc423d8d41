"""Publish events as persistent messages of RabbitMQ (AMQP 0-9-1): write a whole batch, then collect its confirms.

A message has the event's id as message_id, the payload as its JSON body, and the event's headers. The destination alone
decides where it goes: no header is used as a routing key. Nothing is declared here, because the exchange and its
bindings belong to the receiver. Exchange "" with the name of a queue as routing key is that queue.

    basic.ack                                       Sent
    basic.return (no queue is bound), basic.nack    Failed, this event alone
    channel closed: no such exchange, no permission Failed, all events that were not confirmed before
    channel closed for another reason               one event caused it: they are sent again one by one to find it
    headers that AMQP cannot carry, CC and BCC      Refused, before anything is written
    silence, lost connection, alarm, login refused  DestinationDown

If the answers stop after some have come, those count and the other events are released; they may arrive twice but are
not lost. A connection that was closed while idle is noticed and opened again before anything is written. During an
alarm nothing more is written: RabbitMQ would deliver each probe after it. amqps:// uses the system's certificates.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlsplit

from amqp import Connection, Message, spec
from amqp.exceptions import AccessRefused, AMQPError, ChannelError, NotFound, PreconditionFailed
from amqp.serialization import dumps

from outbox.lease import ClaimedEvent
from outbox.publishers import contract
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent, json_bytes

HEADERS_LIMIT: Final = 100_000  # bytes; RabbitMQ closes the connection if the headers do not fit into one frame
ROUTING_HEADERS: Final = {"CC", "BCC"}  # RabbitMQ uses them as further routing keys
CONNECTION_ERRORS: Final = (AMQPError, OSError)
# RabbitMQ may pause a busy publisher for longer than py-amqp's own limit of one second. Only Linux has this option.
TIMEOUT_OPTION: Final = getattr(socket, "TCP_USER_TIMEOUT", None)


class AmqpPublisher:
    """Publish to one exchange with one routing key."""

    is_slow: ClassVar[bool] = False

    def __init__(self, url: str, *, exchange: str, routing_key: str) -> None:
        if any(len(name.encode()) > 255 for name in (exchange, routing_key)):
            raise ValueError("an exchange and a routing key have at most 255 bytes")
        self.exchange = exchange
        self.routing_key = routing_key
        self._address = _address(url)
        self._channel: _ConfirmChannel | None = None

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        batch = _Batch(events)
        deadline = time.monotonic() + contract.BATCH_SECONDS
        try:
            self._send(batch, [place for place, result in enumerate(batch.results) if result is None], deadline)
            for place in batch.suspects:
                if time.monotonic() < deadline:
                    self._send(batch, [place], deadline)
        except (*CONNECTION_ERRORS, _Blocked) as error:
            if not batch.is_answered:
                raise DestinationDown(f"RabbitMQ accepts no messages: {_words(error)}") from None
        return [result or NotTried() for result in batch.results]

    def close(self) -> None:
        if self._channel:
            self._channel.say_goodbye()
        self._drop()

    def _send(self, batch: _Batch, places: Sequence[int], deadline: float) -> None:
        """Send some events of a batch. On an error the connection is dropped, unless an alarm blocks it."""
        if not places:
            return
        channel = self._open()
        channel.report_to(batch)
        try:
            for place in places:
                batch.waiting[channel.write(batch.messages[place], self.exchange, self.routing_key)] = place
                channel.read_available()
            while batch.waiting:
                channel.read(min(contract.PATIENCE_SECONDS, deadline - time.monotonic()))
        except _Blocked:
            raise
        except ChannelError as error:
            self._drop()
            batch.on_channel_closed(error, places)
        except BaseException:
            self._drop()
            raise

    def _open(self) -> _ConfirmChannel:
        if self._channel:
            is_unusable = self._channel.is_blocked  # it may still receive the confirms of an earlier batch
            try:
                self._channel.read_available()
            except CONNECTION_ERRORS:
                is_unusable = True
            if is_unusable:
                self._drop()
        if self._channel is None:
            self._channel = _ConfirmChannel(self._address)
        return self._channel

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel:
            channel.drop()


class _Batch:
    """The messages of a batch, and the answers of the server."""

    def __init__(self, events: Sequence[ClaimedEvent]) -> None:
        self.messages = [_message(event) for event in events]
        self.results: list[Result | None] = [_refusal(event) for event in events]
        self.waiting: dict[int, int] = {}  # delivery tag → place in the batch, in the order of tags
        self.suspects: list[int] = []  # one of these events made the server close the channel
        self.is_answered = False
        self._places = {str(event.id): place for place, event in enumerate(events)}

    def on_confirm(self, result: Result, tag: int, multiple: bool) -> None:
        """Note the result of one message, or of all messages up to this one."""
        self.is_answered = True
        for one in list(takewhile(lambda waiting: waiting <= tag, self.waiting)) if multiple else [tag]:
            place = self.waiting.pop(one)
            self.results[place] = self.results[place] or result

    def on_return(self, error: AMQPError, exchange: str, routing_key: str, message: Message) -> None:
        """Fail an event without a queue. The ack of the same message comes later and then does not mean Sent."""
        self.is_answered = True
        place = self._places[message.properties["message_id"]]
        self.results[place] = Failed(
            f"No queue is bound to exchange {exchange!r} for routing key {routing_key!r}: {_words(error)}"
        )

    def on_channel_closed(self, error: ChannelError, places: Sequence[int]) -> None:
        self.is_answered = True
        self.waiting.clear()
        unsettled = [place for place in places if self.results[place] is None]
        if len(places) > 1 and not isinstance(error, NotFound | AccessRefused):
            self.suspects = unsettled
            return
        kind = Refused if isinstance(error, PreconditionFailed) else Failed
        for place in unsettled:
            self.results[place] = kind(f"RabbitMQ rejected it: {_words(error)}")


class _Blocked(Exception):
    """RabbitMQ is short of memory or disk, and reads nothing from publishers."""


class _ConfirmChannel:
    """A connection with one channel in confirm mode. No call waits longer than PATIENCE_SECONDS."""

    def __init__(self, address: dict[str, Any]) -> None:
        self.is_blocked = False
        self._last_tag = 0
        self._connection = Connection(
            **address,
            login_method="PLAIN",
            connect_timeout=contract.PATIENCE_SECONDS,
            heartbeat=0,  # no thread would send heartbeats between two batches
            socket_settings={TIMEOUT_OPTION: contract.PATIENCE_SECONDS * 1000} if TIMEOUT_OPTION else {},
            client_properties={"connection_name": "celeriac-outbox"},
            on_blocked=lambda _reason: setattr(self, "is_blocked", True),
            on_unblocked=lambda: setattr(self, "is_blocked", False),
        )
        try:
            self._connection.connect()
            connected = self._connection.sock
            assert connected is not None
            self._socket = connected
            self._socket.settimeout(contract.PATIENCE_SECONDS)
            self._channel: Any = self._connection.channel()
            self._channel.confirm_select()
        except BaseException:
            self._connection.collect()
            raise
        self._incoming = select.poll()
        self._incoming.register(self._socket, select.POLLIN)

    def report_to(self, batch: _Batch) -> None:
        """Pass the channel's answers to this batch from now on."""
        self._channel.events["basic_ack"] = {partial(batch.on_confirm, Sent())}
        self._channel.events["basic_nack"] = {partial(batch.on_confirm, Failed(contract.NACKED))}
        self._channel.events["basic_return"] = {batch.on_return}

    def write(self, message: Message, exchange: str, routing_key: str) -> int:
        """Send a message and return the delivery tag of its answer: messages of a channel are counted from 1.

        py-amqp's `basic_publish` is not used: it looks for answers in a loop that spins while one is incomplete.
        """
        arguments = (0, exchange, routing_key, True, False)  # mandatory: a message that has no queue comes back
        try:
            self._channel.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        except OSError:
            self.read_available()  # confirms, and perhaps the reason
            raise
        self._last_tag += 1
        return self._last_tag

    def read_available(self) -> None:
        """Process the answers that have arrived. With TLS a readable socket may contain no complete answer."""
        while self._incoming.poll(0):
            with suppress(TimeoutError):
                self.read(0.001)
        self._check()

    def read(self, seconds: float) -> None:
        """Wait for one answer and process it."""
        if seconds <= 0:
            raise TimeoutError
        self._connection.drain_events(timeout=seconds)
        self._check()

    def say_goodbye(self) -> None:
        """Tell RabbitMQ that the connection ends, without waiting for an answer that may never come."""
        with suppress(*CONNECTION_ERRORS):
            self._connection.send_method(spec.Connection.Close, "BsBB", (0, "", 0, 0))

    def drop(self) -> None:
        with suppress(OSError):  # py-amqp closes the socket by itself if RabbitMQ closed the connection
            self._socket.settimeout(0)  # with TLS, closing would wait for the other side
        self._connection.collect()

    def _check(self) -> None:
        if self.is_blocked:
            raise _Blocked


def _address(url: str) -> dict[str, Any]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port
    except ValueError:  # its message may contain a part of the password
        raise ValueError("its host or port is invalid") from None
    if parts.scheme not in ("amqp", "amqps"):
        raise ValueError("it does not begin with amqp:// or amqps://")
    is_tls = parts.scheme == "amqps"
    return {
        "host": f"{f'[{host}]' if ':' in host else host}:{port or (5671 if is_tls else 5672)}",
        "userid": unquote(parts.username or "guest"),
        "password": unquote(parts.password or "guest"),
        "virtual_host": unquote(parts.path[1:]) or "/",
        "ssl": {"server_hostname": host} if is_tls else False,  # without the name any valid certificate would do
    }


def _message(event: ClaimedEvent) -> Message:
    return Message(
        json_bytes(event.payload),
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=2,  # persistent
        message_id=str(event.id),
        application_headers=dict(event.headers),
    )


def _refusal(event: ClaimedEvent) -> Refused | None:
    if found := ROUTING_HEADERS & event.headers.keys():
        return Refused(f"The header {min(found)} would change where the event goes: remove it.")
    try:
        size = len(dumps("F", (dict(event.headers),)))
    except (struct.error, AMQPError, RecursionError):
        return Refused("AMQP cannot carry its headers: names have at most 255 bytes, integers at most 64 bits.")
    return Refused(f"Its headers have {size} bytes; at most {HEADERS_LIMIT} fit.") if size > HEADERS_LIMIT else None


def _words(error: Exception) -> str:
    """Return the reason. It contains no address: RabbitMQ names only users, vhosts and exchanges."""
    match error:
        case _Blocked():
            return "it is short of memory or disk (connection.blocked)"
        case TimeoutError():
            return "it does not answer"
        case AMQPError(reply_text=str(text)):
            return text
    return str(error)
