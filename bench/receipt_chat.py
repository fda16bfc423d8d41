"""Measure the chat: many WebSocket clients on one API process, which send messages to each other.

Each client is a user with a token of its own. A few of them at a time send to the same receiver, each two messages
right after each other, so that order can be lost; then it is the turn of the next ones. All clients together send at a
fixed rate. They run in this process and share the cores with the API, the worker, PostgreSQL and Redis, so latencies
include the time that the clients need for all the other frames.

A message is complete when its sender has both receipts and its receiver has the message. `reorders` counts messages
that arrived at a receiver before one with a lower place:

    reorder                 the place is the time at which it was sent, over all senders; messages of several senders
                            are sent within a millisecond, so the API cannot know this order, and many are counted
    reorderByServerMsgId    the place is the time at which it was accepted, `acceptedAt` in its receipt
    reorderByFrom           the place is its number, among the messages of one sender; this order must be kept
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect

from api.tokens import Scope
from bench.measure_system import Say
from bench.peers.programs import MeasurementFailed
from bench.receipt_load import Waits
from bench.receipt_stack import Stack, running_servers
from models.receipts import Switch
from receipts import frames, kinds
from receipts.switches import set_switch

RATE: Final = 100.0  # messages per second of all clients together
SENDERS: Final = 3  # that send to the same receiver at the same time
RECEIVERS: Final = 2  # of one sender, in turn
PAIR: Final = 2  # messages that are sent right after each other
CONNECTING: Final = 20  # handshakes at once
PATIENCE_SECONDS: Final = 30.0
MODES: Final = {"saved before delivery": False, "delivered before saved": True}  # deliver-before-saved


@dataclass(frozen=True, slots=True)
class Chat:
    """What the clients saw in one mode. Times count from the call that sends a message."""

    mode: str
    clients: int
    messages: int
    errors: int  # frames of the type ERROR
    lost: int  # receipts and messages that did not arrive
    repeated: int  # receipts and messages that arrived again
    accepted: Waits  # until the sender has the receipt
    saved: Waits
    arrived: Waits  # until the receiver has the message
    reorders: dict[str, int]


def measure(clients: int, messages: int, say: Say) -> Iterator[Chat]:
    """Measure both modes on the same servers, one after the other."""
    with running_servers() as stack:
        users = {f"user{number}": stack.create_token(f"user{number}", Scope.CHAT) for number in range(clients)}
        with stack.programs():
            for mode, is_on in MODES.items():
                say(f"chat, {mode}: {clients:,} clients …")
                _switch(stack, is_on=is_on)
                record = asyncio.run(_talk(stack.port, users, messages, mode))
                stack.await_saved()
                yield summarize(mode, clients, record)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message and when it was sent, by `time.perf_counter`."""

    sender: str
    receiver: str
    number: int
    at: float


@dataclass(slots=True)
class Record:
    """What was sent, by clientMsgId, and what each client received: times and frames."""

    sent: dict[str, Sent] = field(default_factory=dict)
    received: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    missing: int = 0  # frames that are still to come
    moved_at: float = 0.0

    def add(self, user: str, text: str) -> None:
        now = time.perf_counter()
        self.received[user].append((now, text))
        if not text.startswith(CURSOR):
            self.missing -= 1
            self.moved_at = now


CURSOR: Final = json.dumps({"type": frames.CURSOR}, separators=(",", ":"))[:-1]


def summarize(mode: str, clients: int, record: Record) -> Chat:
    """Read the frames that the clients received."""
    waits: dict[str, dict[str, float]] = {"accepted": {}, "saved": {}, "arrived": {}}
    accepted_at: dict[str, str] = {}
    arrivals: dict[str, list[str]] = defaultdict(list)
    errors = repeated = 0
    for user, found in record.received.items():
        for at, text in found:
            frame: dict[str, Any] = json.loads(text)
            match frame["type"]:
                case frames.ACK:
                    kind = frame["ackType"]
                case frames.SINGLE_CHAT:
                    kind = "arrived"
                case frames.ERROR:
                    errors += 1
                    continue
                case _:
                    continue
            id_ = frame["clientMsgId"]
            if id_ in waits[kind]:
                repeated += 1
                continue
            waits[kind][id_] = (at - record.sent[id_].at) * 1000
            if kind == "arrived":
                arrivals[user].append(id_)
            elif kind == "accepted":
                accepted_at[id_] = json.loads(frame["body"])["acceptedAt"]
    lost = sum(len(record.sent) - len(each) for each in waits.values())
    if not all(waits.values()):
        raise MeasurementFailed(f"No message got through; {errors:,} errors.")
    accepted, saved, arrived = (Waits.of(each.values()) for each in waits.values())
    order = reorders(record.sent, accepted_at, arrivals)
    return Chat(mode, clients, len(record.sent), errors, lost, repeated, accepted, saved, arrived, order)


def reorders(sent: dict[str, Sent], accepted_at: dict[str, str], arrivals: dict[str, list[str]]) -> dict[str, int]:
    """Count the messages that arrived at a receiver too early, by each of the three orders."""
    by_sender: dict[tuple[str, str], list[int]] = defaultdict(list)
    for receiver, ids in arrivals.items():
        for id_ in ids:
            by_sender[receiver, sent[id_].sender].append(sent[id_].number)
    known = [[id_ for id_ in ids if id_ in accepted_at] for ids in arrivals.values()]
    return {
        "reorder": sum(too_early([sent[id_].at for id_ in ids]) for ids in arrivals.values()),
        "reorderByServerMsgId": sum(too_early([accepted_at[id_] for id_ in ids]) for ids in known),
        "reorderByFrom": sum(map(too_early, by_sender.values())),
    }


def too_early(places: Sequence[Any]) -> int:
    """Return how many of these come before one with a lower place."""
    count, lowest = 0, None
    for place in reversed(places):
        if lowest is not None and place > lowest:
            count += 1
        else:
            lowest = place
    return count


def _switch(stack: Stack, *, is_on: bool) -> None:
    """Switch delivery before saving as `manage.py receipts set` does, and wait until the worker does so."""
    with stack.engine.begin() as connection:
        set_switch(connection, Switch.DELIVER_BEFORE_SAVED, is_on=is_on, actor="bench")
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while stack.log.hget(kinds.switches_key(), "delivering") not in (("on",) if is_on else ("off", None)):
        stack.require_alive()
        if time.monotonic() > give_up_at:
            raise MeasurementFailed(f"Delivery before saving was not switched. {stack.last_output()}")
        time.sleep(0.05)


async def _talk(port: int, users: dict[str, str], messages: int, mode: str) -> Record:
    record = Record(missing=3 * len(users) * messages)
    limit = asyncio.Semaphore(CONNECTING)
    async with AsyncExitStack() as stack:

        async def join(token: str) -> ClientConnection:
            async with limit:
                return await stack.enter_async_context(_connect(port, token))

        made = await asyncio.gather(*map(join, users.values()))
        connections = dict(zip(users, made, strict=True))
        readers = [asyncio.create_task(_read(user, each, record)) for user, each in connections.items()]
        try:
            await _await_first_frames(record, len(users))
            began_at = time.perf_counter() + 0.1
            async with asyncio.TaskGroup() as group:
                for place, (user, each) in enumerate(connections.items()):
                    group.create_task(
                        _send_all(_Talker(user, place, mode, each), list(users), messages, began_at, record)
                    )
            await _await_rest(record)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return record


def _connect(port: int, token: str) -> connect:
    headers = {"Authorization": f"Bearer {token}"}
    return connect(
        f"ws://127.0.0.1:{port}/ws/chat",
        additional_headers=headers,
        proxy=None,
        compression=None,
        ping_interval=None,
        open_timeout=PATIENCE_SECONDS,
    )


async def _read(user: str, connection: ClientConnection, record: Record) -> None:
    async for text in connection:
        record.add(user, str(text))


@dataclass(frozen=True, slots=True)
class _Talker:
    """One client, and its place among all."""

    user: str
    place: int
    mode: str
    connection: ClientConnection


async def _send_all(talker: _Talker, users: Sequence[str], messages: int, began_at: float, record: Record) -> None:
    for number in range(messages):
        receiver, turn = plan(talker.place, number // PAIR, len(users))
        if (wait := began_at + turn / RATE - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        id_ = f"{talker.mode} {talker.user} {number}"
        given = {"type": frames.SINGLE_CHAT, "to": users[receiver], "clientMsgId": id_, "body": f"message {number}"}
        text = json.dumps({**given, "sendTs": time.time_ns() // 1_000_000})
        record.sent[id_] = Sent(talker.user, users[receiver], number, time.perf_counter())
        await talker.connection.send(text)


def plan(place: int, pair: int, count: int) -> tuple[int, int]:
    """Return the receiver of a pair of messages, and how many messages all clients send before it.

    Neighbours send to the same receiver at the same time; none of them is the receiver.
    """
    size = min(SENDERS, count - 1)
    group = place // size
    receiver = group * size + size + pair % min(RECEIVERS, count - size)
    return receiver % count, PAIR * (pair * count + group * size)


async def _await_first_frames(record: Record, count: int) -> None:
    """Wait until each client has its first CURSOR: from then on it gets what is sent to it."""
    give_up_at = time.perf_counter() + PATIENCE_SECONDS
    while len(record.received) < count:
        if time.perf_counter() > give_up_at:
            raise MeasurementFailed(f"Only {len(record.received):,} of {count:,} clients are connected.")
        await asyncio.sleep(0.05)


async def _await_rest(record: Record) -> None:
    """Wait until every frame has arrived, or nothing more does."""
    ended_at = time.perf_counter()
    while record.missing > 0 and time.perf_counter() < max(record.moved_at, ended_at) + PATIENCE_SECONDS:
        await asyncio.sleep(0.05)
