"""Read entries through a consumer group, if this consumer holds the shard and the gate is open.

    WATCH                       the key with the token of the holder, and the key on which the gate depends
    GET, EVAL                   compare the token with ours, and ask the gate
    MULTI, XREADGROUP, EXEC     Redis reads only if the watched keys have not changed since

A consumer that lost its shard takes no entry: the new holder has written its token before it reads anything, so either
GET finds that token, or EXEC finds that the key has changed.

One script could do the same, but all fields of all entries would be copied into Lua and out of it again. In a drain of
20,000 messages that took 12 µs of Redis and 5 µs of the reader for each entry, where XREADGROUP takes 2 and 1. It is
used only when the memory of Redis is used up: Redis refuses transactions then, and reading is what makes room.

The commands are sent without redis-py's pipeline. If the connection breaks, that raises WatchError as if nothing had
been read; a caller that repeats the read then skips the entries of the lost reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import redis

from receipts.streams.consumers import Shard

NEW: Final = ">"  # the position of entries that the group has not read
IS_OPEN: Final = """
    {gate}
    return is_open and 1 or 0
"""
# KEYS and ARGV as above, then the token, group, consumer, count and position at the end.
READ: Final = """
    local place = #ARGV - 4
    if redis.call('GET', KEYS[2]) ~= ARGV[place] then return 'not_holder' end
    {gate}
    if not is_open then return 'closed' end
    local found = redis.call('XREADGROUP', 'GROUP', ARGV[place + 1], ARGV[place + 2], 'COUNT', ARGV[place + 3],
                             'STREAMS', KEYS[1], ARGV[place + 4])
    return found and found[1][2] or {{}}
"""
ALWAYS_OPEN: Final = "local is_open = true"
Rows = Sequence[tuple[str, list[str] | None]]  # ids and fields; an entry that was deleted has no fields


class NotRead(StrEnum):
    """Why nothing was read."""

    NOT_HOLDER = "not_holder"  # Redis has the token of another consumer
    CLOSED = "closed"  # the gate is closed for new entries


class FencedReader:
    """Reads one shard for one consumer."""

    def __init__(self, client: Any, shard: Shard, holder_key: str) -> None:
        self._client = client
        self._shard = shard
        self._holder_key = holder_key
        self._gate = shard.consumer.gate

    def read(self, token: str, position: str, count: int) -> Rows | NotRead:
        """Return the entries behind a position in the history of the consumer, or new ones."""
        try:
            return self._read_in_transaction(token, position, count)
        except redis.OutOfMemoryError:
            return self._read_by_script(token, position, count)

    def _read_in_transaction(self, token: str, position: str, count: int) -> Rows | NotRead:
        connection = self._client.connection_pool.get_connection()
        try:
            while (found := self._read(connection, token, position, count)) is None:
                pass  # a watched key has changed
            return found
        except BaseException:
            connection.disconnect()  # there may be replies that were not read
            raise
        finally:
            self._client.connection_pool.release(connection)

    def _read_by_script(self, token: str, position: str, count: int) -> Rows | NotRead:
        gate = self._gate if position == NEW else None
        keys, values = (gate.keys, gate.values) if gate else ((), ())
        script = self._client.register_script(READ.format(gate=gate.lua if gate else ALWAYS_OPEN))
        arguments = [*values, token, self._shard.group, self._shard.holder, count, position]
        found = script(keys=[self._shard.key, self._holder_key, *keys], args=arguments)
        return NotRead(found) if isinstance(found, str) else found

    def _read(self, connection: Any, token: str, position: str, count: int) -> Rows | NotRead | None:
        """Return None if a watched key has changed before the read."""
        gate = self._gate if position == NEW else None
        watched = [self._holder_key, *([gate.watched] if gate else [])]
        commands: list[Sequence[Any]] = [("WATCH", *watched), ("GET", self._holder_key)]
        if gate:
            keys = (self._shard.key, self._holder_key, *gate.keys)
            commands.append(("EVAL", IS_OPEN.format(gate=gate.lua), len(keys), *keys, *gate.values))
        _, holder, *is_open = _ask(connection, commands)
        if holder != token or is_open == [0]:
            _ask(connection, [("UNWATCH",)])
            return NotRead.NOT_HOLDER if holder != token else NotRead.CLOSED
        group, key = self._shard.group, self._shard.key
        read = ("XREADGROUP", "GROUP", group, self._shard.holder, "COUNT", count, "STREAMS", key, position)
        *_, executed = _ask(connection, [("MULTI",), read, ("EXEC",)])
        if executed is None:
            return None
        (answer,) = executed
        if isinstance(answer, Exception):
            raise answer
        return _rows(answer)


def _ask(connection: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands at once, and return their replies."""
    connection.send_packed_command(connection.pack_commands(commands))
    return [connection.read_response() for _ in commands]


def _rows(answer: Any) -> Rows:
    """Return the entries of the only stream: a map in the third version of the protocol, pairs in the second."""
    streams = answer.values() if isinstance(answer, dict) else [rows for _, rows in answer or ()]
    return [row for rows in streams for row in rows]
