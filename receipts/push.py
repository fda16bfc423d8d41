"""Push frames to users who are connected: the hub of one API process.

Redis carries frames between processes. The process subscribes to the channel of a user while the user has a socket
here, over one connection for all users. Publishing is best effort, and the ledger makes up for what is lost:

    Redis is unreachable       the hub connects again, after growing pauses; frames from this process reach sockets of
                               this process without Redis
    it is reachable again      every socket reads from the ledger what it has missed
    a socket is slow           only its own queue fills up: `push` returns at once

The hub lives while there are sockets: the first one starts it, and the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import redis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import settings
from receipts import frames
from receipts.cancellation import cancel
from receipts.outgoing import OutFrame

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0
PUBLISH_SECONDS: Final = 1.0
PING_SECONDS: Final = 5.0  # Redis must send something within twice this time
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
CHANNELS_AT_ONCE: Final = 500
FAILURES: Final = (redis.RedisError, OSError, TimeoutError)


class Socket(Protocol):
    """A connection of a user. Its methods must not wait."""

    user: str

    def push(self, frame: OutFrame) -> None:
        """Send a frame to the client, or close the connection if its queue is full."""

    def subscribed(self) -> None:
        """Read what was missed: frames of this user arrive from now on."""


class Hub:
    """The sockets of one event loop, and its connections to Redis."""

    def __init__(self) -> None:
        current = settings.current()
        self._place = settings.place(current.redis_url)
        self._own_channel = frames.channel_of("")  # keeps the connection subscribed; nothing is published there
        pool = ConnectionPool.from_url(
            current.redis_url,
            protocol=2,
            socket_connect_timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._client: Any = Redis(connection_pool=pool)
        self._sockets: dict[str, set[Socket]] = {}  # by channel
        self._subscribed: set[str] = set()  # channels that Redis has confirmed
        self._unanswered: Counter[str] = Counter()  # commands about a channel that Redis has not answered yet
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_down = False
        self._publish_again_at = 0.0

    def join(self, socket: Socket) -> None:
        """Add a socket; its `subscribed` is called as soon as Redis has confirmed the channel of its user."""
        channel = frames.channel_of(socket.user)
        self._sockets.setdefault(channel, set()).add(socket)
        if channel in self._subscribed:
            socket.subscribed()
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self, socket: Socket) -> None:
        channel = frames.channel_of(socket.user)
        if left := self._sockets[channel] - {socket}:
            self._sockets[channel] = left
        else:
            del self._sockets[channel]
            self._changed.set()

    @property
    def is_empty(self) -> bool:
        return not self._sockets

    def count(self, user: str) -> int:
        """Return how many sockets a user has here."""
        return len(self._sockets.get(frames.channel_of(user), ()))

    async def publish(self, pushes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Push frames to users, each given as user and frame, on all processes."""
        is_published = await self._try_to_publish(pushes)
        for user, frame in pushes:
            channel = frames.channel_of(user)
            if not is_published or channel not in self._subscribed:
                self._push(channel, frame)

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            await self._task
        await self._client.aclose(close_connection_pool=True)

    async def _try_to_publish(self, pushes: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
        if time.monotonic() < self._publish_again_at:  # do not let each message wait for a Redis that hangs
            return False
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                pipeline = self._client.pipeline(transaction=False)
                for user, frame in pushes:
                    pipeline.publish(frames.channel_of(user), frames.encode(frame))
                await pipeline.execute()
        except FAILURES as error:
            self._publish_again_at = time.monotonic() + PUBLISH_SECONDS
            logger.debug("Frames were not published: %s", error, extra={"event": "frames_not_published"})
            return False
        return True

    def _push(self, channel: str, frame: Mapping[str, Any]) -> None:
        sockets = self._sockets.get(channel)
        if not sockets:
            return
        try:
            made = OutFrame.of(frame)
        except Exception:  # the key folder is unusable, or this is not a frame of ours; the ledger makes up for it
            logger.exception("A frame cannot be pushed.", extra={"event": "frame_not_pushed"})
            return
        for socket in list(sockets):
            socket.push(made)

    # the connection that is subscribed

    async def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            began_at = time.monotonic()
            try:
                await self._listen()
            except FAILURES as error:
                self._begin_outage(error)
            except Exception:
                logger.exception("The hub failed.", extra={"event": "push_failed"})
            self._subscribed.clear()
            self._unanswered.clear()
            if time.monotonic() - began_at > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):  # noqa: S311 - not a secret
                    await self._closing.wait()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _listen(self) -> None:
        """Stay subscribed until the connection fails, or the hub is closed."""
        pubsub = self._client.pubsub()
        tasks: list[asyncio.Task[Any]] = []
        try:
            await pubsub.connect()
            tasks += map(asyncio.create_task, (self._subscribe(pubsub), self._read(pubsub), self._closing.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(tasks)
            await pubsub.aclose()

    async def _subscribe(self, pubsub: Any) -> None:
        """Subscribe to the channels of users who have a socket, and to no others."""
        asked: set[str] = set()
        while True:
            self._changed.clear()
            wanted = {self._own_channel, *self._sockets}
            self._subscribed &= wanted
            changes = ((pubsub.subscribe, wanted - asked), (pubsub.unsubscribe, asked - wanted))
            for command, channels in changes:
                some = sorted(channels)
                self._unanswered.update(some)
                for at in range(0, len(some), CHANNELS_AT_ONCE):
                    await command(*some[at : at + CHANNELS_AT_ONCE])
            asked = wanted
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                await pubsub.ping()

    async def _read(self, pubsub: Any) -> None:
        while True:
            message = await pubsub.get_message(timeout=2 * PING_SECONDS)
            if message is None:
                raise redis.TimeoutError("Redis does not answer")
            channel = (message["channel"] or b"").decode(errors="replace")
            match message["type"]:
                case "message":
                    self._receive(channel, message["data"])
                case "subscribe" | "unsubscribe" as command:
                    self._confirm(channel, is_subscribed=command == "subscribe")

    def _receive(self, channel: str, data: bytes) -> None:
        try:
            frame = json.loads(data.decode(errors="replace"))
        except ValueError:
            frame = None
        if isinstance(frame, dict):
            self._push(channel, frame)

    def _confirm(self, channel: str, *, is_subscribed: bool) -> None:
        """Note an answer of Redis. The last one about a channel tells whether it is subscribed."""
        self._end_outage()
        self._unanswered[channel] -= 1
        if self._unanswered[channel] > 0:
            return
        del self._unanswered[channel]
        if is_subscribed and channel in self._sockets:
            self._subscribed.add(channel)
            for socket in list(self._sockets[channel]):
                socket.subscribed()

    def _begin_outage(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            fields = {"event": "push_down"}
            logger.warning("Frames are not pushed: Redis at %s: %s", self._place, error, extra=fields)

    def _end_outage(self) -> None:
        if self._is_down:
            self._is_down = False
            logger.warning("Frames are pushed again.", extra={"event": "push_up"})
