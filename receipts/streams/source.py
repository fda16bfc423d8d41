"""Read one shard of a Redis Stream through a consumer group, in order.

    claim     entries that other consumers have read and not acknowledged for CHECKPOINT_CLAIM_IDLE_MS become ours
    history   then our own unacknowledged entries are read, those of an earlier run included
    new       then new entries

New entries are not read before no other consumer has unacknowledged ones, so entries keep their order over a takeover.
A consumer that lost its shard cannot read ahead of the new one either: the holder of the shard writes its token into
Redis, and entries are claimed and read only for that token (`fenced_read.py`). The holder first writes the token and
then asks the ledger whether the shard is still its own, so a token that was written too late is not used.

The client never repeats a command by itself: entries whose reply was lost would be skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import redis

import settings
from models.errors import Unreachable
from receipts.streams.consumers import Shard
from receipts.streams.entries import Entry
from receipts.streams.fault_events import FaultEvent, log_event
from receipts.streams.fenced_read import NEW, FencedReader, NotRead
from receipts.streams.shard_lease import ShardLease
from sinks.hash_tags import key_beside

# Both begin with a write that needs no memory, so that Redis lets them write when its memory is used up.
OPEN: Final = """
    redis.call('DEL', KEYS[2])
    local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
    if type(made) == 'table' and made.err and string.sub(made.err, 1, 9) ~= 'BUSYGROUP' then return made end
    return 1
"""
BECOME_HOLDER: Final = """
    redis.call('DEL', KEYS[1])
    return redis.call('SET', KEYS[1], ARGV[1])
"""
CLAIM: Final = """
    if redis.call('GET', KEYS[2]) ~= ARGV[1] then return false end
    local claimed, cursor, others, deleted = 0, '0-0', 0, 0
    repeat
        local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[2], ARGV[3], ARGV[4], cursor, 'COUNT', 1000, 'JUSTID')
        cursor, claimed = found[1], claimed + #found[2]
        deleted = deleted + #(found[3] or {})  -- since Redis 7: entries that are no longer in the stream
    until cursor == '0-0'
    for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[2])) do
        local consumer = {}
        for place = 1, #fields, 2 do consumer[fields[place]] = fields[place + 1] end
        if consumer.name ~= ARGV[3] then
            if consumer.pending == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[2], consumer.name) end
            others = others + consumer.pending
        end
    end
    return {claimed, others, deleted}
"""
PATIENCE_SECONDS: Final = 5.0  # for an answer of Redis, beyond the time of a blocking read
NOT_IDLE_PAUSE_SECONDS: Final = 0.2
CLOSED_PAUSE_SECONDS: Final = 0.02


class StreamSource:
    """The entries of a shard that this consumer holds."""

    def __init__(self, shard: Shard, lease: ShardLease) -> None:
        current = settings.current()
        self.shard = shard
        self.lease = lease
        self.claim_idle_ms = round(shard.lease_seconds * 1000)
        self.place = settings.place(current.redis_url)
        self.client: Any = redis.Redis.from_url(
            current.redis_url,
            decode_responses=True,
            encoding_errors="surrogateescape",
            socket_connect_timeout=PATIENCE_SECONDS,
            socket_timeout=current.receipt_block_ms / 1000 + PATIENCE_SECONDS,
            retry=None,
        )
        self._holder_key = key_beside(shard.key, f"holder:{shard.group}")
        self._claim = self.client.register_script(CLAIM)
        self._reader = FencedReader(self.client, shard, self._holder_key)
        self.is_closed = False  # at the last read, for the gate or for entries of another consumer
        self._is_claimed = False
        self._position = "0"  # in our history, then NEW
        self.last_id = "0"

    def open(self) -> None:
        """Create the group, and let the scripts read for this consumer and no other."""
        keys = [self.shard.key, self._holder_key]
        self.ask(self.client.register_script(OPEN), keys=keys, args=[self.shard.group])
        self._become_holder()
        if self.shard.consumer.acknowledge is not None:
            self.shard.consumer.acknowledge(self, [])  # deletes what a consumer has left that died before it did so
        self.last_id = self._last_delivered_id()

    def read(self, count: int, *, wait_seconds: float) -> list[Entry]:
        """Return the next entries; wait for new ones. An entry without fields was deleted from the stream."""
        if not self._is_claimed and not self._claim_old_ones(wait_seconds):
            return []
        found = self._read_from(self._position, count)
        if not found and self._position != NEW:
            self._position = NEW
            found = self._read_from(NEW, count)
        if not found and wait_seconds > 0 and wait_for_any([self], wait_seconds):
            found = self._read_from(NEW, count)
        return found

    def claim_entries(self, ids: Sequence[str]) -> None:
        """Make these entries ours, whatever their idle time, if they are not acknowledged yet."""
        if ids:
            self.ask("xclaim", self.shard.key, self.shard.group, self.shard.holder, 0, list(ids), justid=True)

    def acknowledge(self, ids: Iterable[str]) -> int:
        """Acknowledge entries; return how many were not acknowledged before."""
        given = list(ids)
        if not given:
            return 0
        if self.shard.consumer.acknowledge is not None:
            return self.shard.consumer.acknowledge(self, given)
        return int(self.ask("xack", self.shard.key, self.shard.group, *given))

    def run_as_holder(self, script: str, keys: Sequence[str], *values: Any) -> Any:
        """Run a script that begins by comparing ARGV[1], our token, with KEYS[2], and returns false if they differ."""
        return self._fenced(self.client.register_script(script), *values, more_keys=keys)

    def report_deleted(self, count: int) -> None:
        """Log that entries were deleted from the stream, or trimmed, before their effects."""
        if count:
            message = f"{count} entries were deleted from the stream before they were acknowledged."
            log_event(FaultEvent.ENTRIES_TRIMMED, message, self.shard, entries=count)

    def ask(self, command: Any, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client, or a script; raise Unreachable if Redis does not answer."""
        try:
            return (getattr(self.client, command) if isinstance(command, str) else command)(*arguments, **options)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise Unreachable(f"Redis at {self.place} is unreachable: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        self.client.close()

    def _last_delivered_id(self) -> str:
        groups = self.ask("xinfo_groups", self.shard.key)
        (found,) = (group["last-delivered-id"] for group in groups if group["name"] == self.shard.group)
        return str(found)

    def _become_holder(self) -> None:
        script = self.client.register_script(BECOME_HOLDER)
        self.ask(script, keys=[self._holder_key], args=[self.lease.token.hex])
        self.lease.renew()  # after the write: raises LeaseLost if another consumer has taken the shard over

    def _claim_old_ones(self, wait_seconds: float) -> bool:
        """Claim what other consumers have left. Return False if an entry of theirs is not idle for long enough."""
        answer = self._fenced(self._claim, self.shard.group, self.shard.holder, self.claim_idle_ms)
        claimed, others, deleted = answer
        self.report_deleted(deleted)
        if claimed:
            message = f"Claimed {claimed} entries of a consumer that is gone."
            log_event(FaultEvent.ENTRIES_CLAIMED, message, self.shard, entries=claimed)
        self.is_closed = others > 0
        if others:
            time.sleep(min(wait_seconds, NOT_IDLE_PAUSE_SECONDS))
            return False
        self._is_claimed = True
        return True

    def _read_from(self, position: str, count: int) -> list[Entry]:
        while (found := self.ask(self._reader.read, self.lease.token.hex, position, count)) is NotRead.NOT_HOLDER:
            self._become_holder()
        self.is_closed = found is NotRead.CLOSED
        entries = [] if self.is_closed else [Entry(id_, _pairs(fields)) for id_, fields in found]
        if entries and position == NEW:
            self.last_id = entries[-1].id
        elif entries:
            self._position = entries[-1].id
        return entries

    def _fenced(self, script: Any, *arguments: Any, more_keys: Sequence[str] = ()) -> Any:
        """Run a script. If a stale consumer has written its token, write ours again, provided it is still valid."""
        keys = [self.shard.key, self._holder_key, *more_keys]
        while (answer := self.ask(script, keys=keys, args=[self.lease.token.hex, *arguments])) is None:
            self._become_holder()
        return answer


def wait_for_any(sources: Sequence[StreamSource], seconds: float) -> bool:
    """Wait until one of the streams has an entry that its group has not read; False if none has in time.

    This takes nothing. What it finds may have been delivered already, if an operator has moved the group; then the next
    call starts from there. A source that is closed has entries that it may not read yet, so it is not waited for.
    """
    open_ones = [source for source in sources if not source.is_closed]
    if len(open_ones) < len(sources):
        seconds = min(seconds, CLOSED_PAUSE_SECONDS)
    if not open_ones:
        time.sleep(seconds)
        return True
    milliseconds = max(1, round(seconds * 1000))
    found = open_ones[0].ask(
        "xread", {source.shard.key: source.last_id for source in open_ones}, count=1, block=milliseconds
    )
    keys = set(found) if isinstance(found, dict) else {key for key, _ in found or ()}
    for source in open_ones:
        if source.shard.key in keys:
            source.last_id = source._last_delivered_id()
    return bool(keys) or len(open_ones) < len(sources)


def _pairs(fields: list[str] | None) -> dict[str, str]:
    return dict(zip(fields[::2], fields[1::2], strict=True)) if fields else {}
