"""The chat over WebSocket: `/ws/chat?cursor=…`. `receipts/frames.py` describes the frames.

    Authorization        the scope `chat`; the name of the token is the user (`websocket_authorization.py`)
    cursor               the body of the last CURSOR that the client got; what it missed since then is sent first

The connections of a process share a hub, to which other processes push frames, and a few reads of the ledger at a time,
so that many clients that connect at once leave threads for the others.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from api import tokens
from api.chat_connection import ChatConnection
from api.websocket_authorization import Visitor, WebSocketRoute
from models.errors import CeleriacError
from receipts.chat_history import LARGEST_CURSOR, BadCursor
from receipts.push import Hub

PATH: Final = "/ws/chat"
SUBPROTOCOL: Final = "celeriac.chat"
MOST_OF_ONE_USER: Final = 100  # connections, in one process
READS_AT_ONCE: Final = 4


class TooManyConnections(CeleriacError):
    """The user has too many open chats.

    One user has 100 connections to one API process, probably because a client opens new ones without closing others.
    """

    code = "too_many_connections"
    remedy = "Close connections that are no longer needed; one connection per device is enough."
    http_status = 429


class Chats:
    """What the connections of one event loop share."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.reads = asyncio.Semaphore(READS_AT_ONCE)


_by_loop: dict[asyncio.AbstractEventLoop, Chats] = {}


async def serve(scope: Scope, receive: Receive, send: Send, visitor: Visitor) -> None:
    """Serve one connection until it ends."""
    user, cursor = visitor.token.name, _read_cursor(scope["query_string"])
    loop = asyncio.get_running_loop()
    chats = _by_loop.get(loop) or _by_loop.setdefault(loop, Chats())
    if chats.hub.count(user) >= MOST_OF_ONE_USER:
        raise TooManyConnections
    connection = ChatConnection(user, cursor, visitor.check_again, chats.hub, chats.reads)
    chats.hub.join(connection)
    try:
        await receive()  # websocket.connect
        await send({"type": "websocket.accept", "subprotocol": visitor.subprotocol})
        await connection.run(receive, send)
    finally:
        chats.hub.leave(connection)
        if chats.hub.is_empty:
            _by_loop.pop(loop, None)
            await chats.hub.close()


ROUTE: Final = WebSocketRoute(serve, tokens.Scope.CHAT, SUBPROTOCOL)


def _read_cursor(query: bytes) -> int | None:
    """Return the cursor of the address; other parameters are ignored."""
    found = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("cursor")
    if not found:
        return None
    if len(found) > 1 or not found[0].isascii() or not found[0].isdecimal() or len(found[0]) > len(str(LARGEST_CURSOR)):
        raise BadCursor("`cursor` must be the number of a CURSOR frame.")
    cursor = int(found[0])
    if cursor > LARGEST_CURSOR:
        raise BadCursor("`cursor` must be the number of a CURSOR frame.")
    return cursor
