"""Lists in Redis: a repetition finds its key, whatever was lost, and no key is without its entry."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from chaos.fault_proxy import EVALSHA, Fault, FaultProxy
from embedded.redis import find_server
from models.errors import Unreachable
from sinks.configuration import open_sinks
from sinks.contract import Effect, EffectState, SinkMisused, SinkNotReady
from sinks.redis_list import IdempotentRecord, RedisLists
from tasks.core.task import Task
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import task as row

LIFE = timedelta(hours=1)
LEAGUE = "league:1"


@pytest.fixture
def client(stack: ServersOfTests) -> Iterator[Any]:
    with redis.Redis.from_url(stack.addresses["REDIS_URL"], decode_responses=True) as client:
        yield client


@pytest.fixture
def sink(stack: ServersOfTests) -> Iterator[RedisLists]:
    sink = RedisLists("scores", stack.addresses["REDIS_URL"], key_life=LIFE)
    yield sink
    sink.close()


@pytest.fixture
def scores(configure: Callable[..., None], ledger: ServersOfTests) -> RedisLists:
    """The sink `scores` of tasks."""
    configure(scores={"url": ledger.addresses["REDIS_URL"], "guarantee": "keyed", "key_life_hours": 1})
    sink = open_sinks().find("scores")
    assert isinstance(sink, RedisLists)
    return sink


def append(sink: RedisLists, key: str, value: Any = None, name: str = LEAGUE) -> int:
    return sink.named(name).append(IdempotentRecord(key, value or key))


def entries(client: Any, name: str = LEAGUE) -> list[Any]:
    return [json.loads(entry) for entry in client.lrange(name, 0, -1)]


def effects(sink: RedisLists, id_: uuid.UUID) -> list[Effect]:
    return list(sink.effects(open_sinks().installation(), id_))


# The list.


def test_a_repetition_returns_the_position_of_the_first_time_and_appends_nothing(sink: RedisLists, client: Any) -> None:
    client.rpush(LEAGUE, '"before"')
    assert [append(sink, "a", {"ä": 1}), append(sink, "b"), append(sink, "a", "other")] == [2, 3, 2]
    assert entries(client) == ["before", {"ä": 1}, "b"]


def test_a_batch_takes_each_key_once(sink: RedisLists, client: Any) -> None:
    records = [IdempotentRecord(key, key) for key in "abab"]
    assert sink.named(LEAGUE).append_all(records) == [1, 2, 1, 2]
    assert sink.named(LEAGUE).append_all([]) == []
    assert entries(client) == ["a", "b"]


def test_lists_with_the_same_hash_tag_do_not_share_keys(sink: RedisLists, client: Any) -> None:
    names = ["{l}", "{l}:1", "x{l}", "l"]
    assert [append(sink, "a", name, name) for name in names] == [1, 1, 1, 1]
    assert [entries(client, name) for name in names] == [[name] for name in names]


def test_keys_expire_after_the_key_life(sink: RedisLists, client: Any) -> None:
    append(sink, "a")
    (key,) = client.keys("celeriac:*")
    assert LIFE.total_seconds() * 0.9 < client.ttl(key) <= LIFE.total_seconds()


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.RESET])
def test_a_lost_reply_is_asked_for_again_and_appends_once(stack: ServersOfTests, client: Any, fault: Fault) -> None:
    with FaultProxy(stack.addresses["REDIS_URL"]) as line:
        sink = RedisLists("scores", line.url, key_life=LIFE)
        assert append(sink, "a") == 1
        line.arm(fault, EVALSHA)
        assert append(sink, "b") == 2
        assert line.strikes
        sink.close()
    assert entries(client) == ["a", "b"]


def test_a_redis_that_has_forgotten_the_script_is_sent_it_again(sink: RedisLists, client: Any) -> None:
    append(sink, "a")
    client.script_flush()
    assert [append(sink, "a"), append(sink, "b")] == [1, 2]


class Interrupted(BaseException):
    """What a time limit raises in the middle of a command."""


def test_the_answer_to_an_interrupted_command_does_not_pass_for_the_next_one(sink: RedisLists) -> None:
    """The interruption comes after the first of two answers, and before Redis has sent the second one."""

    def interrupt(_answer: object) -> None:
        raise Interrupted

    sink._client().set_response_callback("ECHO", interrupt)
    with pytest.raises(Interrupted):
        sink.execute([("ECHO", "first"), ("BLPOP", "nothing", "0.2")])
    assert sink.execute([("ECHO", "mine")]) == ["mine"]


@contextmanager
def configured(client: Any, **settings: str) -> Iterator[None]:
    names = {name.replace("_", "-"): value for name, value in settings.items()}
    before = {name: client.config_get(name)[name] for name in names}
    for name, value in names.items():
        client.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            client.config_set(name, value)


@pytest.mark.guarantee
def test_a_redis_that_may_evict_keys_is_not_ready(sink: RedisLists, client: Any) -> None:
    assert sink.check() == "it evicts no keys"
    fresh = RedisLists("scores", sink.url, key_life=LIFE)
    with configured(client, maxmemory_policy="volatile-lru"):
        for use in (sink.check, fresh.check, lambda: append(fresh, "a")):
            with pytest.raises(SinkNotReady, match=r"may evict .* its maxmemory-policy is volatile-lru, set it"):
                use()
    assert append(fresh, "a") == 1
    fresh.close()


def test_a_full_redis_neither_loses_nor_doubles_an_effect(sink: RedisLists, client: Any) -> None:
    append(sink, "a")
    with configured(client, maxmemory="1"), pytest.raises(redis.ResponseError, match="OOM"):
        append(sink, "b")
    assert len(client.keys("celeriac:seen:*")) == 1
    assert append(sink, "b") == 2


def test_a_key_that_is_not_a_list_is_an_error_before_anything_is_written(sink: RedisLists, client: Any) -> None:
    client.set(LEAGUE, "text")
    with pytest.raises(SinkMisused, match="'league:1' is not a list"):
        append(sink, "a")
    assert client.keys() == [LEAGUE]
    client.delete(LEAGUE)
    assert append(sink, "a") == 1


def test_an_entry_that_redis_refuses_does_not_leave_its_key_behind(sink: RedisLists, client: Any) -> None:
    """The account may set keys, but not append."""
    client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-rpush")
    port = client.connection_pool.connection_kwargs["port"]
    limited = RedisLists("scores", f"redis://limited:secret@127.0.0.1:{port}/0", key_life=LIFE)
    try:
        with pytest.raises(redis.ResponseError, match=r"executing the script|ACL failure"):
            append(limited, "a")
    finally:
        limited.close()
        client.execute_command("ACL", "DELUSER", "limited")
    assert client.keys() == []
    assert (append(sink, "a"), entries(client)) == (1, ["a"])


def test_an_unreachable_redis_is_one_sentence_without_its_password() -> None:
    sink = RedisLists("scores", "redis://me:hunter2@127.0.0.1:1/0", key_life=LIFE)
    with pytest.raises(Unreachable, match=r"^Redis at 127.0.0.1:1 is unreachable: ") as error:
        append(sink, "a")
    assert "hunter2" not in str(error.value)
    bad = RedisLists("scores", "redis://me:hunter2@[::1/0", key_life=LIFE)
    with pytest.raises(SinkNotReady, match="address of the sink scores cannot be used") as refused:
        bad.check()
    assert "hunter2" not in str(refused.value)


# Slots.


@pytest.mark.parametrize("name", [LEAGUE, "{tag}:list", "a{b}c{d}", "{{b}", "a{{b}}", "{open", "{ä}", "with space"])
def test_a_list_and_its_keys_are_in_one_slot(sink: RedisLists, name: str) -> None:
    assert key_slot(sink.named(name).seen_key("a }{ b").encode()) == key_slot(name.encode())


@pytest.mark.parametrize("name", ["", "a}b", "{}", "{}x", "}{", "a}{}b"])
def test_a_name_whose_keys_would_be_in_another_slot_is_refused(sink: RedisLists, name: str) -> None:
    with pytest.raises(SinkMisused, match="in different slots"):
        sink.named(name)


def test_a_list_cannot_overwrite_keys_of_ours(sink: RedisLists) -> None:
    with pytest.raises(SinkMisused, match="belong to Celeriac"):
        sink.named("celeriac:used:1")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis Cluster of one node: it refuses scripts whose keys are in several slots."""
    port = _free_port()
    options = {"port": port, "bind": "127.0.0.1", "dir": tmp_path, "cluster-enabled": "yes", "save": ""}
    command = [str(find_server()), *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with redis.Redis.from_url(url) as client:
            wait_until(lambda: _answers(client), "the cluster answers")
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "it has all slots")
        yield url
    finally:
        server.terminate()
        server.wait(10)


def _free_port() -> int:
    """Return a port below 30000: the nodes of a cluster talk at the port that is 10000 higher."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("there is no free port")


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_a_cluster_accepts_the_script(cluster: str, configure: Callable[..., None], ledger: ServersOfTests) -> None:
    configure(scores={"url": cluster, "guarantee": "keyed"})
    id_ = ran(lambda task: [task.sink("scores").append(name, 1) for name in (LEAGUE, "{x}:1")])
    assert (state(id_)[0], row(id_)["result"]) == ("SUCCEEDED", [1, 1])


# Tasks.


def test_a_business_key_counts_for_all_tasks_and_a_step_for_one(scores: RedisLists, client: Any) -> None:
    def write(task: Task) -> list[int]:
        sink = task.sink("scores")
        return [
            sink.append(LEAGUE, "payment", key="payment 17"),
            sink.append(LEAGUE, "default"),
            sink.append(LEAGUE, "bonus", step="bonus"),
            sink.append("league:2", "default"),
        ]

    ids = [ran(write), ran(write)]
    assert [row(id_)["result"] for id_ in ids] == [[1, 2, 3, 1], [1, 4, 5, 2]]
    assert entries(client) == ["payment", "default", "bonus", "default", "bonus"]


def test_a_loop_without_steps_fails_instead_of_losing_effects(scores: RedisLists, client: Any) -> None:
    def write(task: Task) -> None:
        for n in range(2):
            task.sink("scores").append(LEAGUE, n)

    id_ = ran(write)
    assert "before: give each effect its own `step`" in row(id_)["error_message"]
    assert entries(client) == [0]


def test_an_empty_business_key_is_refused(scores: RedisLists) -> None:
    id_ = ran(lambda task: task.sink("scores").append(LEAGUE, 1, key=""))
    assert row(id_)["error_message"] == "SinkMisused: The business key is empty."


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("window", "states"), [("redis_list.before_script", []), ("redis_list.after_script", [EffectState.COMMITTED])]
)
def test_an_operator_learns_what_a_killed_worker_has_appended(
    scores: RedisLists, ledger: ServersOfTests, window: str, states: list[EffectState]
) -> None:
    with handled(TYPE, lambda task: task.sink("scores").append(LEAGUE, 1), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
        assert [effect.state for effect in effects(scores, id_)] == states
        reclaim_lost(ledger)
        later(ledger, 3600)
        delivered([id_])
    key = f"event:{open_sinks().installation()} {id_} effect"
    assert effects(scores, id_) == [Effect("scores", EffectState.COMMITTED, "effect", f"list league:1, {key}")]


def test_an_operator_learns_what_a_task_wanted_and_did_not_append(scores: RedisLists, client: Any) -> None:
    client.set("text", "no list")

    def write(task: Task) -> None:
        task.sink("scores").append(LEAGUE, 1, key="payment 17")
        task.sink("scores").append("text", 2, step="second")

    id_ = ran(write)
    assert [(effect.state, effect.step) for effect in effects(scores, id_)] == [
        (EffectState.COMMITTED, "effect"),
        (EffectState.NOT_COMMITTED, "second"),
    ]
    assert 0 < client.ttl(f"celeriac:used:{open_sinks().installation()}:{id_}") <= LIFE.total_seconds()
    assert effects(scores, uuid.uuid4()) == []
