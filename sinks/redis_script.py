"""A sink in the Redis that also has the stream: one script writes, remembers the key, and acknowledges the entry.

The script is atomic: an entry is never acknowledged without its effect, or the other way round. So neither the ledger
nor a two-phase commit is needed. It serves consumers of streams only (`receipts/streams/consume.py`).

    the entry is pending for this consumer     append the value, unless its key is known; acknowledge the entry
    the entry is pending for another consumer  refuse the whole batch: this consumer has lost the entry
    the entry is not pending                   it was committed before: its key is known, or it is behind the frontier

The script first checks all records and then writes, because Redis rolls nothing back. If the reply is lost, it is run
again and gives the same answer: the position of each value in its list.

The stream, the lists, the remembered keys and the frontier (the last committed entry) share one hash tag, as Redis
Cluster requires of the keys of a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final

import redis

import settings
from failpoint import failpoint
from models.errors import LeaseLost, Unreachable
from sinks.contract import Guarantee, Sink, SinkMisused, SinkNotReady
from sinks.hash_tags import key_beside, require_same_hash_tag

# KEYS: stream, frontier, then the list and the remembered key of each record.
# ARGV: group, consumer, key life in milliseconds, then the entry id and the value of each record.
COMMIT: Final = """
    local function is_before(left, right)
        for place = 1, 2 do  -- as text, because numbers of 64 bits do not fit into Lua's
            local a, b = left[place], right[place]
            if #a ~= #b then return #a < #b end
            if a ~= b then return a < b end
        end
        return false
    end
    local function parts(id) return {string.match(id, '^(%d+)-(%d+)$')} end

    local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
    local frontier = redis.call('GET', KEYS[2]) or '0-0'
    local records, is_pending = {}, {}
    for place = 3, #KEYS, 2 do
        local record = {list = KEYS[place], seen = KEYS[place + 1], id = ARGV[place + 1], value = ARGV[place + 2]}
        local kind = redis.call('TYPE', record.list).ok
        if kind ~= 'none' and kind ~= 'list' then return {'not_a_list', record.list} end
        local owner = redis.call('XPENDING', stream, group, record.id, record.id, 1)[1]
        is_pending[record.id] = owner ~= nil
        if owner then
            if owner[2] ~= consumer then return {'lost', record.id} end
        end
        local is_seen = redis.call('GET', record.seen)
        if not owner and not is_seen and is_before(parts(frontier), parts(record.id)) then
            return {'lost', record.id}
        end
        table.insert(records, record)
    end

    local answer = {'committed'}
    for _, record in ipairs(records) do
        local position = redis.call('GET', record.seen)
        if not position and is_pending[record.id] then
            position = redis.call('RPUSH', record.list, record.value)
            redis.call('SET', record.seen, position, 'PX', ARGV[3])
        end
        redis.call('XACK', stream, group, record.id)
        if is_before(parts(frontier), parts(record.id)) then frontier = record.id end
        table.insert(answer, tonumber(position or 0))
    end
    redis.call('SET', KEYS[2], frontier)
    return answer
"""
PATIENCE_SECONDS: Final = 5.0
RUNS: Final = 3  # of a script whose reply is lost
NO_GROUP: Final = "NOGROUP"


@dataclass(frozen=True, slots=True)
class PendingEntries:
    """Whose pending entries a script acknowledges."""

    stream: str
    group: str
    consumer: str


@dataclass(frozen=True, slots=True)
class ScriptRecord:
    """A value for a list, the key of this effect, and the entry that caused it."""

    entry_id: str
    list: str
    key: str
    value: str


class RedisScript(Sink):
    """Lists of the Redis that has the stream."""

    guarantee: ClassVar[Guarantee] = Guarantee.SCRIPT

    def __init__(self, name: str, url: str, *, key_life: timedelta) -> None:
        self.name = name
        self.key_life: timedelta | None = key_life
        self.place = settings.place(url)
        timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), PATIENCE_SECONDS)
        how: dict[str, Any] = {"decode_responses": True, "encoding_errors": "surrogateescape", "retry": None}
        self.client: Any = redis.Redis.from_url(url, **timeouts, **how)
        self._commit = self.client.register_script(COMMIT)

    @property
    def conditions(self) -> Sequence[str]:
        assert self.key_life is not None
        return [
            "It serves consumers of streams, and is the Redis that has the stream (REDIS_URL).",
            "Stream and lists share one hash tag.",
            "Redis keeps what it has written: appendonly yes, appendfsync always, noeviction.",
            f"A message that is published again within {self.key_life.days} days is recognised by its key.",
        ]

    def bind(self, task: object) -> Any:
        del task
        raise SinkMisused(
            f"The sink {self.name} serves consumers of streams only, because its script acknowledges the entry of a"
            ' stream. Give a task a sink with the guarantee "keyed" instead.'
        )

    def commit(self, pending: PendingEntries, records: Sequence[ScriptRecord]) -> list[int]:
        """Append and acknowledge; return the position of each value in its list, 0 if its key is forgotten.

        Raises LeaseLost, and has written nothing, if another consumer has one of the entries.
        """
        if not records:
            return []
        require_same_hash_tag(pending.stream, [record.list for record in records])
        keys = [pending.stream, key_beside(pending.stream, f"frontier:{pending.stream}:{pending.group}")]
        arguments = [pending.group, pending.consumer, self._key_life_ms]
        for record in records:
            keys += [record.list, key_beside(pending.stream, f"seen:{record.list}:{record.key}")]
            arguments += [record.entry_id, record.value]
        failpoint("script.before")
        answer, *details = self._run(keys, arguments)
        failpoint("script.after")
        match answer:
            case "lost":
                raise LeaseLost(
                    f"Another consumer has the entry {details[0]} of {pending.stream}; nothing was written."
                )
            case "not_a_list":
                raise SinkNotReady(f"The key {details[0]!r} of the sink {self.name} is not a list.")
        return [int(position) for position in details]

    def check(self) -> str:
        try:
            self.client.ping()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise self._unreachable(error) from None
        return f"Redis at {self.place}"

    def close(self) -> None:
        self.client.close()

    @property
    def _key_life_ms(self) -> int:
        assert self.key_life is not None
        return max(1, round(self.key_life.total_seconds() * 1000))

    def _run(self, keys: list[str], arguments: list[Any]) -> list[Any]:
        """Run the script, and run it again if its reply is lost."""
        for run in range(1, RUNS + 1):
            try:
                return list(self._commit(keys=keys, args=arguments))
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if run == RUNS:
                    raise self._unreachable(error) from None
            except redis.ResponseError as error:
                if NO_GROUP not in str(error):
                    raise
                message = f"The sink {self.name} must be the Redis that has the stream, which is that of REDIS_URL."
                raise SinkNotReady(message) from None
        raise AssertionError("unreachable")

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"Redis at {self.place} (sink {self.name}) is unreachable: {str(error).rstrip('.')}.")
