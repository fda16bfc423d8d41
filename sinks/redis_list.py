"""A keyed sink in Redis: lists that take each key once. One script checks the key and appends.

    task.sink("scores").append("league:1", payment)                      once for this task
    task.sink("scores").append("league:1", bonus, step="bonus")          a second effect of the same task
    task.sink("scores").append("league:1", payment, key="payment 17")    once for this key, whatever task appends it

Redis is authoritative. The script writes the entry and the key of the effect, `celeriac:seen:{TAG}:HASH`, or neither,
and remembers the position of the entry, so that a repetition gets the same answer.

    died before the script       nothing has happened; the retry appends
    the reply was lost           the script runs again, at once and in the retry of the task, and finds the key
    a late worker appends, too   it finds the key
    the key life is over         the key has expired, and a repetition would append again
    a full Redis evicts keys     prevented: the sink requires maxmemory-policy noeviction

Before the script, in the same round trip, the task notes what it is about to append in the set
`celeriac:used:INSTALLATION:TASK`. An operator can so be told what a task has done, although keys are hashes.

In Redis Cluster a script may touch one slot only. So the key has the hash tag of the list: the part of its name in
braces, or else its whole name.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Generic, TypeVar

import redis

from failpoint import failpoint
from models.errors import Unreachable, shorten
from outbox.canonical_json import canonical_json
from settings import place
from sinks.contract import Effect, EffectState, Guarantee, Sink, SinkMisused, SinkNotReady, TaskWithSteps
from sinks.effect_keys import effect_key
from sinks.hash_tags import hash_tag

# Nothing is rolled back when a script fails, so LLEN finds out that the list is not a list before the first write, and
# the key is deleted if Redis refuses the entry.
SCRIPT: Final = """
-- KEYS: the key of the effect, the list. ARGV: the value, the key life in milliseconds.
local position = redis.call('GET', KEYS[1])
if position then
    return tonumber(position)
end
position = redis.call('LLEN', KEYS[2]) + 1
redis.call('SET', KEYS[1], position, 'PX', ARGV[2])
local pushed = redis.pcall('RPUSH', KEYS[2], ARGV[1])
if type(pushed) == 'table' then
    redis.call('DEL', KEYS[1])
end
return pushed
"""
SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
DEFAULT_STEP: Final = "effect"
OURS: Final = "celeriac:"
TIMEOUT_SECONDS: Final = 5.0
LOST: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
Command = tuple[str | int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdempotentRecord(Generic[T]):
    """A value, and the key of its effect (`effect_keys.py`)."""

    key: str
    value: T


class RedisLists(Sink):
    """The lists of one Redis."""

    guarantee: ClassVar[Guarantee] = Guarantee.KEYED

    def __init__(self, name: str, url: str, *, key_life: timedelta) -> None:
        self.name = name
        self.url = url
        self.key_life: timedelta | None = key_life
        self._of_thread = threading.local()
        self._evicts_nothing = False

    @property
    def conditions(self) -> Sequence[str]:
        hours = f"{self.key_life_ms / 3_600_000:g}"
        return [
            "The Redis evicts no keys (maxmemory-policy noeviction).",
            "It keeps what it has confirmed (appendonly yes, appendfsync always); what a crash or failover of Redis "
            "loses is not written again.",
            f"No task runs later than {hours} hours after its first attempt: its key has expired then.",
        ]

    def bind(self, task: TaskWithSteps) -> BoundRedisLists:
        return BoundRedisLists(self, task)

    @property
    def key_life_ms(self) -> int:
        assert self.key_life is not None
        return max(1, round(self.key_life.total_seconds() * 1000))

    def named(self, name: str) -> IdempotentList:
        """Return the list of this name."""
        return IdempotentList(self, name)

    def check(self) -> str:
        self._evicts_nothing = False
        self.require_noeviction()
        return "it evicts no keys"

    def effects(self, installation: uuid.UUID, task_id: uuid.UUID) -> Sequence[Effect]:
        """Return what the task has noted, and whether Redis has its key."""
        (noted,) = self.execute([("SMEMBERS", _used_key(installation, task_id))])
        uses = sorted(map(json.loads, noted))
        found = self.execute([("EXISTS", self.named(name).seen_key(key)) for name, _, key in uses])
        return [
            Effect(
                self.name, EffectState.COMMITTED if is_there else EffectState.NOT_COMMITTED, step, f"list {name}, {key}"
            )
            for (name, step, key), is_there in zip(uses, found, strict=True)
        ]

    def close(self) -> None:
        self._disconnect()

    def require_noeviction(self) -> None:
        """Raise SinkNotReady if a full Redis would delete keys. The first answer is remembered."""
        if self._evicts_nothing:
            return
        (memory,) = self.execute([("INFO", "memory")])
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SinkNotReady(
                f"The Redis of the sink {self.name} may evict the keys of effects: its maxmemory-policy is {policy}, "
                "set it to noeviction."
            )
        self._evicts_nothing = True

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip; return their answers, or raise the first error.

        All commands of this sink can be repeated, so that is done once if the answers are lost.
        """
        if not commands:
            return []
        answers: list[Any] = []
        for is_last in (False, True):
            try:
                pipeline: Any = self._client().pipeline(transaction=False)
                with pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    answers = pipeline.execute(raise_on_error=False)
                break
            except BaseException as error:
                self._disconnect()  # an unread answer must not pass for the answer to the next command
                if not isinstance(error, LOST):
                    raise
                if is_last:
                    raise Unreachable(f"Redis at {place(self.url)} is unreachable: {str(error).rstrip('.')}.") from None
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _client(self) -> redis.Redis:
        """Return the client of this thread. A thread that has to disconnect does not disturb another one."""
        client: redis.Redis | None = getattr(self._of_thread, "client", None)
        if client is None:
            timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), TIMEOUT_SECONDS)
            try:
                client = redis.Redis.from_url(self.url, **timeouts, retry=None, decode_responses=True)
            except ValueError:  # its text would repeat the address
                raise SinkNotReady(f"The address of the sink {self.name} cannot be used: it is not a URL.") from None
            self._of_thread.client = client
        return client

    def _disconnect(self) -> None:
        client: redis.Redis | None = self._of_thread.__dict__.pop("client", None)
        if client is not None:
            client.close()


class IdempotentList:
    """A list that takes each key once."""

    def __init__(self, sink: RedisLists, name: str) -> None:
        self.sink = sink
        self.name = name
        if hash_tag(self.seen_key("")) != hash_tag(name):
            raise SinkMisused(
                f"{shorten(name)} cannot be the name of a list: Redis Cluster would keep the list and the keys of its "
                "effects in different slots. Leave out '}', or put a part of the name in braces."
            )
        if name.startswith(OURS):
            raise SinkMisused(f"{shorten(name)} cannot be the name of a list: keys with {OURS} belong to Celeriac.")

    def seen_key(self, key: str) -> str:
        """Return the key in Redis that says that the effect has happened. Lists with the same tag have their own."""
        digest = hashlib.sha256(canonical_json([self.name, key], what="key").encode()).hexdigest()
        return f"{OURS}seen:{{{hash_tag(self.name)}}}:{digest}"

    def append(self, record: IdempotentRecord[Any]) -> int:
        """Append the value as JSON, and return its position, counted from 1. A repetition returns the same."""
        return self.append_all([record])[0]

    def append_all(self, records: Sequence[IdempotentRecord[Any]], *, before: Sequence[Command] = ()) -> list[int]:
        """Append values in one round trip, each once for its key. The commands in `before` are executed first."""
        life = self.sink.key_life_ms
        arguments: list[Command] = [
            (2, self.seen_key(record.key), self.name, canonical_json(record.value, what="value"), life)
            for record in records
        ]
        self.sink.require_noeviction()
        failpoint("redis_list.before_script")
        try:
            try:
                answers = self.sink.execute([*before, *(("EVALSHA", SHA, *each) for each in arguments)])
            except redis.exceptions.NoScriptError:
                answers = self.sink.execute([*before, *(("EVAL", SCRIPT, *each) for each in arguments)])
        except redis.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise SinkMisused(
                f"{shorten(self.name)} is not a list in the Redis of the sink {self.sink.name}."
            ) from None
        failpoint("redis_list.after_script")
        return answers[len(before) :]


@dataclass(frozen=True, slots=True)
class BoundRedisLists:
    """`task.sink(name)` for lists in Redis."""

    sink: RedisLists
    task: TaskWithSteps

    def append(self, name: str, value: Any, *, step: str = DEFAULT_STEP, key: str | None = None) -> int:
        """Append a value, as JSON, to the list of this name, unless that has been done; return its position, from 1.

        A business key names the effect for all tasks. Without one, this task appends once for each list and step.
        """
        if key == "":
            raise SinkMisused("The business key is empty.")
        target = self.sink.named(name)
        record = IdempotentRecord(
            effect_key(business_key=key, event_id=f"{self.task.installation} {self.task.task_id} {step}"), value
        )
        used_key = _used_key(self.task.installation, self.task.task_id)
        noted = canonical_json([name, step, record.key], what="name of the list, step and key")
        once = self.task.using_once(self.sink.name, step, where=name) if key is None else nullcontext()
        with once:
            self.task.check_lease()
            before: list[Command] = [("SADD", used_key, noted), ("PEXPIRE", used_key, self.sink.key_life_ms)]
            return target.append_all([record], before=before)[0]


def _used_key(installation: uuid.UUID, task_id: uuid.UUID) -> str:
    return f"{OURS}used:{installation}:{task_id}"
