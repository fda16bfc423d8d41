"""Events as persistent messages of a RabbitMQ (AMQP 0-9-1): a batch is written whole, then its confirms are collected.

A message has the event's id as message_id, the payload as its JSON body and the event's headers as headers. Where it
goes is the destination's affair: no header is read as a routing key, and nothing is declared here, since an exchange
and what is bound to it belong to whoever receives. Exchange "" with the name of a queue as routing key is that queue.

    basic.ack                                       Sent
    basic.return (nothing is bound), basic.nack     Failed, that event alone
    channel closed: no such exchange, no right      Failed, all that were not confirmed before
    channel closed for any other reason             an event's fault: one by one they show whose
    headers that AMQP cannot carry, CC and BCC      Refused, before anything is written
    silence, lost connection, alarm, login refused  DestinationDown: no event's fault, and an operator's to mend

If the answers stop after some have come, those count and the rest is given back; it may arrive twice, never not at all.
A connection that was closed while idle is noticed before anything of the batch is written, and opened again. While an
alarm lasts, nothing more is written: each probe would arrive when it is over. amqps:// trusts whom the system trusts.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlsplit

from amqp import Connection, Message, spec
from amqp.exceptions import AccessRefused, AMQPError, ChannelError, NotFound, PreconditionFailed
from amqp.serialization import dumps

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent

PATIENCE_SECONDS: Final = 3  # with a server that says nothing
LIMIT_SECONDS: Final = 15  # for a batch whose confirms come, but slowly
HEADERS_LIMIT: Final = 100_000  # bytes; RabbitMQ closes the connection if they do not fit into one frame
ADDRESSES: Final = {"CC", "BCC"}  # headers that RabbitMQ takes for further routing keys
GONE: Final = (AMQPError, OSError)


class AmqpPublisher:
    """One exchange and one routing key of one RabbitMQ."""

    is_slow: ClassVar[bool] = False

    def __init__(self, url: str, *, exchange: str, routing_key: str) -> None:
        """Raises ValueError, in a sentence without the address, if it cannot be used."""
        if any(len(name.encode()) > 255 for name in (exchange, routing_key)):
            raise ValueError("an exchange and a routing key have at most 255 bytes")
        self.exchange = exchange
        self.routing_key = routing_key
        self._address = _address(url)
        self._line: _Line | None = None

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        batch = _Batch(events)
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            self._send(batch, batch.unsettled, deadline)
            for place in batch.suspects:
                if time.monotonic() < deadline:
                    self._send(batch, [place], deadline)
        except (*GONE, _Blocked) as error:
            if not batch.is_answered:
                raise DestinationDown(f"RabbitMQ takes no messages: {_words(error)}") from None
        return [result or NotTried() for result in batch.results]

    def close(self) -> None:
        if self._line:
            self._line.say_goodbye()
        self._drop()

    def _send(self, batch: _Batch, places: Sequence[int], deadline: float) -> None:
        """Raises what it cannot settle, and has then dropped the line, unless an alarm holds it up."""
        if not places:
            return
        line = self._open_line()
        line.tell(batch)
        try:
            for place in places:
                batch.waiting[line.write(batch.messages[place], self.exchange, self.routing_key)] = place
                line.read_what_has_come()
            while batch.waiting:
                line.read(min(PATIENCE_SECONDS, deadline - time.monotonic()))
        except _Blocked:
            raise
        except ChannelError as error:
            self._drop()
            batch.on_channel_closed(error, places)
        except BaseException:
            self._drop()
            raise

    def _open_line(self) -> _Line:
        if self._line:
            was_blocked = self._line.is_blocked
            try:
                self._line.read_what_has_come()
            except GONE:
                self._drop()
            if was_blocked:
                self._drop()  # it may yet hear the confirms of an earlier batch
        if self._line is None:
            self._line = _Line(self._address)
        return self._line

    def _drop(self) -> None:
        line, self._line = self._line, None
        if line:
            line.drop()


class _Batch:
    """The messages of a batch, and what the server has said of them."""

    def __init__(self, events: Sequence[ClaimedEvent]) -> None:
        self.messages = [_message(event) for event in events]
        self.results: list[Result | None] = [_refusal(event) for event in events]
        self.waiting: dict[int, int] = {}  # delivery tag → place in the batch, in the order of tags
        self.suspects: list[int] = []  # the channel was closed because of one of them
        self.is_answered = False
        self._places = {str(event.id): place for place, event in enumerate(events)}

    @property
    def unsettled(self) -> list[int]:
        return [place for place, result in enumerate(self.results) if result is None]

    def on_ack(self, tag: int, multiple: bool) -> None:
        self._settle(tag, multiple, Sent())

    def on_nack(self, tag: int, multiple: bool) -> None:
        self._settle(tag, multiple, Failed("RabbitMQ did not keep it (basic.nack): its queue is full or unavailable."))

    def on_return(self, error: AMQPError, exchange: str, routing_key: str, message: Message) -> None:
        """Comes before the ack of the same message, which then means only that it was dealt with."""
        self.is_answered = True
        place = self._places[message.properties["message_id"]]
        self.results[place] = Failed(
            f"Nothing is bound to exchange {exchange!r} for routing key {routing_key!r}: {_words(error)}"
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
            self.results[place] = kind(f"RabbitMQ refused it: {_words(error)}")

    def _settle(self, tag: int, multiple: bool, result: Result) -> None:
        self.is_answered = True
        tags = list(takewhile(lambda one: one <= tag, self.waiting)) if multiple else [tag]
        for one in tags:
            place = self.waiting.pop(one)
            self.results[place] = self.results[place] or result


class _Blocked(Exception):
    """RabbitMQ is short of memory or disk, and reads nothing from those who publish."""


class _Line:
    """One connection with one channel. Nothing on it waits for longer than the patience."""

    def __init__(self, address: dict[str, Any]) -> None:
        self.is_blocked = False
        self._last_tag = 0
        self._connection = Connection(
            **address,
            login_method="PLAIN",
            connect_timeout=PATIENCE_SECONDS,
            heartbeat=0,  # between two batches nobody would answer
            socket_settings=_SOCKET_SETTINGS,
            client_properties={"connection_name": "celeriac-outbox"},
            on_blocked=self._on_blocked,
            on_unblocked=self._on_unblocked,
        )
        try:
            self._connection.connect()
            connected = self._connection.sock
            assert connected is not None
            self._socket = connected
            self._socket.settimeout(PATIENCE_SECONDS)
            self._channel: Any = self._connection.channel()
            self._channel.confirm_select()
        except BaseException:
            self._connection.collect()
            raise
        self._incoming = select.poll()
        self._incoming.register(self._socket, select.POLLIN)

    def tell(self, batch: _Batch) -> None:
        """From now on the channel's answers are about this batch."""
        self._channel.events["basic_ack"] = {batch.on_ack}
        self._channel.events["basic_nack"] = {batch.on_nack}
        self._channel.events["basic_return"] = {batch.on_return}

    def write(self, message: Message, exchange: str, routing_key: str) -> int:
        """Returns the delivery tag that the answer will name: the channel's messages are counted from 1.

        Not by `basic_publish`: it looks for answers in a way that spins for as long as one has come by half.
        """
        arguments = (0, exchange, routing_key, True, False)  # mandatory: what cannot be routed comes back
        try:
            self._channel.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        except OSError:
            self.read_what_has_come()  # confirms, and perhaps the reason
            raise
        self._last_tag += 1
        return self._last_tag

    def read_what_has_come(self) -> None:
        """Without waiting. With TLS a readable socket may still have nothing for us."""
        while self._incoming.poll(0):
            with suppress(TimeoutError):
                self.read(0.001)
        self._check()

    def read(self, seconds: float) -> None:
        """One answer."""
        if seconds <= 0:
            raise TimeoutError
        self._connection.drain_events(timeout=seconds)
        self._check()

    def say_goodbye(self) -> None:
        """Without waiting for an answer, which may never come."""
        with suppress(*GONE):
            self._connection.send_method(spec.Connection.Close, "BsBB", (0, "", 0, 0))

    def drop(self) -> None:
        with suppress(OSError):  # py-amqp has closed it, if RabbitMQ said goodbye
            self._socket.settimeout(0)  # with TLS, closing would wait for the other side
        self._connection.collect()

    def _check(self) -> None:
        if self.is_blocked:
            raise _Blocked

    def _on_blocked(self, _reason: str) -> None:
        self.is_blocked = True

    def _on_unblocked(self) -> None:
        self.is_blocked = False


# py-amqp's own limit of one second is less than RabbitMQ may pause a busy publisher for
_SOCKET_SETTINGS: Final = {
    getattr(socket, name): PATIENCE_SECONDS * 1000 for name in ("TCP_USER_TIMEOUT",) if hasattr(socket, name)
}


def _address(url: str) -> dict[str, Any]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port
    except ValueError:  # its words may hold a piece of the password
        raise ValueError("its host or port cannot be read") from None
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
        json.dumps(event.payload, ensure_ascii=False).encode(),
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=2,  # persistent
        message_id=str(event.id),
        application_headers=dict(event.headers),
    )


def _refusal(event: ClaimedEvent) -> Refused | None:
    if found := ADDRESSES & event.headers.keys():
        return Refused(f"The header {min(found)} would choose where the event goes; that is the destination's affair.")
    try:
        size = len(dumps("F", (dict(event.headers),)))
    except (struct.error, AMQPError, RecursionError):
        return Refused("Its headers are not such as AMQP knows: names of up to 255 bytes, numbers of up to 64 bits.")
    return Refused(f"Its headers have {size} bytes; {HEADERS_LIMIT} fit.") if size > HEADERS_LIMIT else None


def _words(error: Exception) -> str:
    """Nothing here holds an address: RabbitMQ names users, vhosts and exchanges, the system names errors."""
    match error:
        case _Blocked():
            return "it is short of memory or disk (connection.blocked)"
        case TimeoutError():
            return "it does not answer"
        case AMQPError(reply_text=str(text)):
            return text
    return str(error)
