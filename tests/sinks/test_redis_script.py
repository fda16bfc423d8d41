"""The script that writes to a list and acknowledges the entry: ownership, duplicates, lost replies, and validation."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from chaos.fault_proxy import EVALSHA, Fault, FaultProxy
from models.errors import LeaseLost, Unreachable
from settings import place
from sinks.configuration import open_sinks
from sinks.contract import SinkMisused, SinkNotReady
from sinks.redis_script import PendingEntries, RedisScript, ScriptRecord
from tests.servers import ServersOfTests
from tests.tasks.outside import ran, state
from tests.tasks.work import task

STREAM, GROUP, LIST = "orders", "save", "{orders}:totals"
FRONTIER = "celeriac:{orders}:frontier:orders:save"
MINE = PendingEntries(STREAM, GROUP, "me")
KEY_LIFE = timedelta(hours=2)


@pytest.fixture
def client(stack: ServersOfTests) -> Iterator[Any]:
    with redis.Redis.from_url(stack.addresses["REDIS_URL"], decode_responses=True) as client:
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        yield client


@pytest.fixture
def sink(stack: ServersOfTests) -> Iterator[RedisScript]:
    sink = RedisScript("totals", stack.addresses["REDIS_URL"], key_life=KEY_LIFE)
    yield sink
    sink.close()


def read(client: Any, count: int, *, consumer: str = "me") -> list[str]:
    """Add entries to the stream and let a consumer read them."""
    ids = [client.xadd(STREAM, {"n": n}) for n in range(count)]
    client.xreadgroup(GROUP, consumer, {STREAM: ">"})
    return ids


def records(ids: list[str], *, list_name: str = LIST) -> list[ScriptRecord]:
    return [ScriptRecord(id_, list_name, f"key {n}", f"value {n}") for n, id_ in enumerate(ids)]


def appended(client: Any) -> list[str]:
    values: list[str] = client.lrange(LIST, 0, -1)
    return values


def pending(client: Any) -> int:
    return int(client.xpending(STREAM, GROUP)["pending"])


def test_one_script_appends_acknowledges_and_advances_the_frontier(client: Any, sink: RedisScript) -> None:
    ids = read(client, 3)
    assert sink.commit(MINE, records(ids)) == [1, 2, 3]
    assert appended(client) == ["value 0", "value 1", "value 2"]
    assert pending(client) == 0
    assert client.get(FRONTIER) == ids[-1]


def test_no_records_are_no_effect(client: Any, sink: RedisScript) -> None:
    assert sink.commit(MINE, []) == []


@pytest.mark.guarantee
def test_a_consumer_that_lost_one_of_its_entries_writes_nothing_at_all(client: Any, sink: RedisScript) -> None:
    """XACK does not check who has read an entry, so the script does."""
    ids = read(client, 3)
    client.xclaim(STREAM, GROUP, "another", 0, [ids[1]])
    with pytest.raises(LeaseLost, match=f"Another consumer has the entry {ids[1]}"):
        sink.commit(MINE, records(ids))
    assert appended(client) == []
    assert pending(client) == 3
    assert client.get(FRONTIER) is None


@pytest.mark.guarantee
def test_a_consumer_whose_entries_were_committed_by_another_one_repeats_nothing(client: Any, sink: RedisScript) -> None:
    ids = read(client, 2)
    client.xclaim(STREAM, GROUP, "another", 0, ids)
    assert sink.commit(PendingEntries(STREAM, GROUP, "another"), records(ids)) == [1, 2]
    assert sink.commit(MINE, records(ids)) == [1, 2]
    assert len(appended(client)) == 2


@pytest.mark.guarantee
def test_an_entry_that_was_never_read_is_refused(client: Any, sink: RedisScript) -> None:
    id_ = client.xadd(STREAM, {"n": 0})
    with pytest.raises(LeaseLost):
        sink.commit(MINE, records([id_]))
    assert appended(client) == []


@pytest.mark.guarantee
def test_a_duplicate_is_acknowledged_and_not_appended(client: Any, sink: RedisScript) -> None:
    """The same message was published again, as another entry with the same key."""
    first, second = read(client, 2)
    assert sink.commit(MINE, [ScriptRecord(first, LIST, "key", "value")]) == [1]
    assert sink.commit(MINE, [ScriptRecord(second, LIST, "key", "value")]) == [1]
    assert appended(client) == ["value"]
    assert pending(client) == 0


def test_a_duplicate_in_the_same_batch_is_acknowledged_and_not_appended(client: Any, sink: RedisScript) -> None:
    ids = read(client, 2)
    assert sink.commit(MINE, [ScriptRecord(id_, LIST, "key", "value") for id_ in ids]) == [1, 1]
    assert appended(client) == ["value"]
    assert pending(client) == 0


def test_an_entry_may_append_to_several_lists(client: Any, sink: RedisScript) -> None:
    (id_,) = read(client, 1)
    other = "{orders}:names"
    assert sink.commit(MINE, [ScriptRecord(id_, LIST, "key", "a"), ScriptRecord(id_, other, "key", "b")]) == [1, 1]
    assert (appended(client), client.lrange(other, 0, -1)) == (["a"], ["b"])


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.RESET])
def test_a_script_whose_reply_is_lost_is_run_again_and_gives_the_same_answer(
    client: Any, stack: ServersOfTests, fault: Fault
) -> None:
    ids = read(client, 4)
    with FaultProxy(stack.addresses["REDIS_URL"]) as proxy:
        sink = RedisScript("totals", proxy.url, key_life=KEY_LIFE)
        assert sink.commit(MINE, records(ids)[:2]) == [1, 2]
        proxy.arm(fault, EVALSHA)
        assert sink.commit(MINE, records(ids)[2:]) == [3, 4]
        assert proxy.strikes
        sink.close()
    assert len(appended(client)) == 4
    assert pending(client) == 0


@pytest.mark.guarantee
def test_keys_expire_after_the_key_life_and_the_frontier_still_knows_what_was_committed(
    client: Any, sink: RedisScript
) -> None:
    ids = read(client, 2)
    sink.commit(MINE, records(ids))
    seen = client.keys("celeriac:{orders}:seen:*")
    assert len(seen) == 2
    for key in seen:
        assert 0 < client.ttl(key) <= KEY_LIFE.total_seconds()
        client.delete(key)
    assert sink.commit(MINE, records(ids)) == [0, 0]
    assert len(appended(client)) == 2


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("99-0", "100-0"), ("100-9", "100-10"), ("9007199254740993-0", "9007199254740994-0"), ("1-0", "2-0")],
)
def test_the_frontier_compares_entry_ids_as_numbers_and_never_goes_back(
    client: Any, sink: RedisScript, earlier: str, later: str
) -> None:
    for id_ in (earlier, later):
        client.xadd(STREAM, {"n": 0}, id=id_)
    client.xreadgroup(GROUP, "me", {STREAM: ">"})
    sink.commit(MINE, [ScriptRecord(later, LIST, "later", "later")])
    assert client.get(FRONTIER) == later
    sink.commit(MINE, [ScriptRecord(earlier, LIST, "earlier", "earlier")])
    assert client.get(FRONTIER) == later
    assert appended(client) == ["later", "earlier"]


@pytest.mark.guarantee
def test_everything_is_checked_before_the_first_write(client: Any, sink: RedisScript) -> None:
    """Redis rolls nothing back, so the second list must not fail after the first one was written."""
    ids = read(client, 2)
    client.set("{orders}:text", "not a list")
    good, bad = ScriptRecord(ids[0], LIST, "a", "a"), ScriptRecord(ids[1], "{orders}:text", "b", "b")
    with pytest.raises(SinkNotReady, match=r"'\{orders\}:text' of the sink totals is not a list"):
        sink.commit(MINE, [good, bad])
    client.hset("celeriac:{orders}:seen:{orders}:totals:key 1", "a", "b")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        sink.commit(MINE, records(ids))
    assert appended(client) == []
    assert pending(client) == 2


def test_a_list_with_another_hash_tag_is_refused_with_an_example(client: Any, sink: RedisScript) -> None:
    ids = read(client, 1)
    with pytest.raises(SinkMisused, match=r"'orders' and 'totals' must share one hash tag"):
        sink.commit(MINE, records(ids, list_name="totals"))


def test_a_redis_that_does_not_have_the_stream_is_reported(stack: ServersOfTests) -> None:
    sink = RedisScript("totals", stack.addresses["BROKER_URL"], key_life=KEY_LIFE)
    with pytest.raises(SinkNotReady, match="The sink totals must be the Redis that has the stream"):
        sink.commit(MINE, records(["1-0"]))
    sink.close()


def test_a_redis_that_does_not_answer_is_reported_without_its_password() -> None:
    sink = RedisScript("totals", "redis://:hunter2@127.0.0.1:1/0", key_life=KEY_LIFE)
    for ask in (sink.check, lambda: sink.commit(MINE, records(["1-0"]))):
        with pytest.raises(Unreachable, match=r"Redis at 127.0.0.1:1 \(sink totals\) is unreachable") as error:
            ask()
        assert "hunter2" not in str(error.value)


def test_a_task_that_names_this_sink_is_told_why_it_cannot(configure: Any, stack: ServersOfTests) -> None:
    url = stack.addresses["REDIS_URL"]
    configure(totals={"url": url, "guarantee": "script"})
    sink = open_sinks().find("totals")
    assert sink.check() == f"Redis at {place(url)}"
    assert sink.conditions
    id_ = ran(lambda task: task.sink("totals"))
    assert state(id_)[0] == "RETRYING"
    assert "The sink totals serves consumers of streams only" in task(id_)["error_message"]
