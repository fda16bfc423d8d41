"""One connection of a user to the chat: what arrives is answered in order, and what concerns the user is sent.

Three tasks share the connection; it ends with the first of them, or when another part closes it.

    read       frames of the client, one after the other, so that a sender's messages stay in order
    write      the queue of outgoing frames. A client that is too slow is closed with 1013 and loses nothing: it
               reconnects with its cursor
    keep up    on connecting, every SYNC_SECONDS, and after an outage of Redis, what was missed is read from the
               ledger. The token is checked again, too: one that was revoked ends the connection with 1008

A frame may come from the hub and from the ledger. What was sent on this connection is not sent again, as far as it is
remembered; a client drops other repetitions by serverMsgId. Frames of the hub wait while what was missed is read, and
the receipt `saved` of a message waits until `accepted` was sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.types import Receive, Send

import metrics
from api.errors import FAILED
from api.ledger_calls import call_ledger
from api.receiving import receiving
from api.tokens import Forbidden, Token, Unauthenticated
from models.database_errors import translate
from models.engine import autocommit, engine
from models.errors import CeleriacError, Misuse, Unreachable
from models.receipts import Level
from receipts import frames
from receipts.cancellation import cancel
from receipts.chat_history import BadCursor, Missed, read_missed
from receipts.chat_messages import BadMessage, ChatMessage
from receipts.outgoing import OutFrame, Outgoing
from receipts.push import Hub
from settings import SettingsError

logger = logging.getLogger(__name__)

FRAME_BYTES: Final = 262_144  # a body of 32 KiB may be six times as long in JSON
MOST_ERRORS: Final = 10  # invalid frames in a row
SYNC_SECONDS: Final = 15.0
SUBSCRIBE_SECONDS: Final = 1.0  # how long the first read waits until frames of the hub arrive
HOLD_SECONDS: Final = 2.0  # how long frames of the hub wait for a ledger that does not answer
IDLE_SECONDS: Final = 3600.0
CLOSE_SECONDS: Final = 5.0
PAGE: Final = 50  # messages
REMEMBERED: Final = 1000  # frames that were sent
OPTIONAL: Final = frozenset({"from", "msgType", "sendTs"})
REQUIRED: Final = frozenset({"type", "to", "clientMsgId", "body"})
NORMAL, POLICY_VIOLATION, TRY_AGAIN_LATER = 1000, 1008, 1013
TRY_AGAIN: Final = "The message could not be received just now. Send it again with the same clientMsgId."


class Closing(Exception):
    """The connection is to be closed with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ChatConnection:
    """A `Socket` of the hub."""

    def __init__(
        self,
        user: str,
        cursor: int | None,
        check_token: Callable[[], Awaitable[Token]],
        hub: Hub,
        reads: asyncio.Semaphore,
    ) -> None:
        self.user = user
        self._cursor = cursor
        self._missed: Missed | None = None  # the last read of the ledger
        self._check_token = check_token
        self._hub = hub
        self._reads = reads
        self._outgoing = Outgoing()
        self._sent: dict[str, None] = {}  # keys of frames, oldest first
        self._held = Outgoing()
        self._is_holding = False
        self._answering: str | None = None  # the serverMsgId of the message that is being received
        self._wants_to_read = asyncio.Event()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hold_timer: asyncio.TimerHandle | None = None
        self._errors = 0
        self._active_at = time.monotonic()
        self._hold()

    async def run(self, receive: Receive, send: Send) -> None:
        """Serve the client until the connection ends, and close it if the client did not."""
        work = (self._read(receive), self._write(send), self._keep_up())
        tasks: list[asyncio.Future[None]] = [*map(asyncio.create_task, work), self._closing]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._hold_timer is not None:
                self._hold_timer.cancel()
            await cancel(tasks)
        try:
            for task in done:
                task.result()
        except Closing as closing:
            await _close(send, closing)

    # called by the hub

    def push(self, frame: OutFrame) -> None:
        if self._is_holding or (frame.server_msg_id is not None and frame.server_msg_id == self._answering):
            if self._held.has_room_for(frame):
                self._held.add(frame)
            else:
                self._overflow()
        else:
            self._send_once(frame)

    def subscribed(self) -> None:
        self._hold()
        self._wants_to_read.set()

    # frames of the client

    async def _read(self, receive: Receive) -> None:
        while (event := await receive())["type"] != "websocket.disconnect":
            self._active_at = time.monotonic()
            await self._answer(event.get("text"))
            if self._errors >= MOST_ERRORS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await self._outgoing.wait_until_empty()
                raise Closing(POLICY_VIOLATION, "too many invalid frames")

    async def _answer(self, text: str | None) -> None:
        """Receive a message, and answer with its receipt or with an error."""
        began_at = time.monotonic()
        given: Mapping[str, Any] | None = None
        try:
            given = parse(text)
            message = read_message(given, self.user)
            message.check()
            self._answering = str(message.id)
            receipt = await receiving().chat(message)
            frame = frames.receipt_frame(message, receipt)
            self._send(OutFrame.of(frame), began_at)
        except Exception as error:
            self._send(OutFrame.of(frames.error_frame(*describe(error), given)))
            self._errors = self._errors + 1 if isinstance(error, Misuse) else 0
            return
        finally:
            self._answering = None
            self._release()
        self._errors = 0
        if receipt.level is Level.SAVED and not receipt.duplicate:
            await self._push_saved(message, frame)

    async def _push_saved(self, message: ChatMessage, receipt: Mapping[str, Any]) -> None:
        """Push what was saved at once, as the saver does for accepted messages."""
        await self._hub.publish([(message.sender, receipt), (message.receiver, frames.message_frame(message))])

    # frames to the client

    async def _write(self, send: Send) -> None:
        while True:
            waiting = await self._outgoing.first()
            try:
                await send({"type": "websocket.send", "text": waiting.frame.text})
            except (OSError, RuntimeError):  # the connection is lost, or uvicorn is closing it
                return
            self._outgoing.remove_first()
            if waiting.began_at is not None:
                metrics.RECEIPT_ACK_SECONDS.observe(time.monotonic() - waiting.began_at)

    def _send_once(self, frame: OutFrame) -> None:
        if frame.key is None or frame.key not in self._sent:
            self._active_at = time.monotonic()
            self._send(frame)

    def _send(self, frame: OutFrame, began_at: float | None = None) -> None:
        if not self._outgoing.has_room_for(frame):
            self._overflow()
            return
        self._outgoing.add(frame, began_at)
        if frame.key is not None:
            self._sent.pop(frame.key, None)
            self._sent[frame.key] = None
            if len(self._sent) > REMEMBERED:
                del self._sent[next(iter(self._sent))]

    def _overflow(self) -> None:
        if not self._closing.done():
            self._closing.set_exception(Closing(TRY_AGAIN_LATER, "the client is too slow; reconnect with the cursor"))

    def _hold(self) -> None:
        """Keep frames of the hub back until what was missed is read, so that they do not overtake it."""
        self._is_holding = True
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        self._hold_timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._stop_holding)

    def _stop_holding(self) -> None:
        self._is_holding = False
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        self._release()

    def _release(self) -> None:
        for frame in self._held.take_all():
            self.push(frame)

    # what was missed

    async def _keep_up(self) -> None:
        await self._wait_until_wanted(SUBSCRIBE_SECONDS)
        while True:
            self._wants_to_read.clear()
            await self._catch_up()
            if not self._wants_to_read.is_set():
                self._stop_holding()
            await self._wait_until_wanted(SYNC_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - not a secret
            await self._require_token()
            if time.monotonic() - self._active_at > IDLE_SECONDS:
                raise Closing(NORMAL, "idle")

    async def _wait_until_wanted(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wants_to_read.wait()

    async def _catch_up(self) -> None:
        """Send what was missed, page by page. While the ledger does not answer, that is left to the next time."""
        is_complete = False
        while not is_complete:
            try:
                async with self._reads:
                    missed, found = await call_ledger(self._read_page)
            except BadCursor as error:
                self._send(OutFrame.of(frames.error_frame(error.code, error.message)))
                self._cursor = None
                continue
            except Exception as error:
                if getattr(translate(error) or error, "http_status", None) != Unreachable.http_status:
                    logger.exception(
                        "What a user has missed cannot be read.", extra={"event": "chat_history_unreadable"}
                    )
                return
            for frame in found:
                await self._outgoing.wait_for_room(frame)
                self._send_once(frame)
            cursor = OutFrame.of(frames.cursor_frame(missed.cursor))
            await self._outgoing.wait_for_room(cursor)
            self._send(cursor)
            self._missed, is_complete = missed, missed.is_complete

    def _read_page(self) -> tuple[Missed, list[OutFrame]]:
        """Read a page, and sign its receipts. Runs in a thread."""
        with autocommit(engine()) as connection:
            missed = read_missed(connection, self.user, self._cursor, PAGE, after=self._missed)
        return missed, [OutFrame.of(frame) for frame in missed.frames]

    async def _require_token(self) -> None:
        try:
            token = await self._check_token()
        except (Unauthenticated, Forbidden) as error:
            raise Closing(POLICY_VIOLATION, error.code) from None
        except Exception as error:
            logger.warning("A token cannot be checked: %s", error, extra={"event": "token_not_checked"})
            raise Closing(TRY_AGAIN_LATER, "the token cannot be checked now") from None
        if token.name != self.user:
            raise Closing(POLICY_VIOLATION, Unauthenticated.code)


def parse(text: str | None) -> dict[str, Any]:
    """Return the frame of a client as a JSON object, or raise BadMessage."""
    if text is None:
        raise BadMessage("A frame must be text, not binary.")
    if len(text) > FRAME_BYTES or len(text.encode(errors="replace")) > FRAME_BYTES:
        raise BadMessage(f"The frame has more than {FRAME_BYTES:,} bytes.")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise BadMessage("The frame is not JSON.") from None
    if not isinstance(given, dict):
        raise BadMessage("The frame is not a JSON object.")
    return given


def read_message(given: Mapping[str, Any], user: str) -> ChatMessage:
    """Return the message of a frame; its values are not checked yet. A field that is null counts as absent."""
    named = {name: value for name, value in given.items() if value is not None}
    if named.get("type") != frames.SINGLE_CHAT:
        raise BadMessage(f"`type` must be {frames.SINGLE_CHAT}.")
    if missing := sorted(REQUIRED - named.keys()):
        raise BadMessage(f"`{missing[0]}` is missing.")
    if unknown := sorted(named.keys() - REQUIRED - OPTIONAL):
        raise BadMessage(f"There is no field {unknown[0][:100]!r}.")
    if named.get("from", user) != user:
        raise BadMessage("`from` must be the name of your token, or absent.")
    return ChatMessage(
        user, named["to"], named["clientMsgId"], named["body"], named.get("msgType", "text"), named.get("sendTs")
    )


def describe(error: Exception) -> tuple[str, str]:
    """Return code and sentence of an error for the client. Addresses of servers and bugs are only logged."""
    match translate(error) or error:
        case (Unreachable() | SettingsError()) as unreachable:
            logger.warning("%s", unreachable, extra={"event": "ledger_unreachable"})
            return unreachable.code, TRY_AGAIN
        case CeleriacError() as known if known.http_status != CeleriacError.http_status:
            return known.code, known.message
    logger.error("A chat message failed.", exc_info=error, extra={"event": "chat_message_failed"})
    return CeleriacError.code, FAILED


async def _close(send: Send, closing: Closing) -> None:
    """Close the connection. A client that does not read cannot be told; the server cuts it off later."""
    with suppress(OSError, TimeoutError, RuntimeError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await send({"type": "websocket.close", "code": closing.code, "reason": closing.reason})
