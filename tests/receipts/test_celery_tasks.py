"""The Celery task that consumes streams, in real workers: it hands over, and survives kills and signals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import settings
from checks import workers
from checks.result import Level
from embedded.stack import plan
from models.engine import engine
from models.errors import Misuse
from models.receipts import Switch
from receipts.celery_tasks import consume
from receipts.chat_messages import ChatMessage
from receipts.needed_consumers import needed_consumers
from receipts.save import save_any_shard
from receipts.streams import consume as consume_module
from receipts.streams import consumers
from receipts.streams.consumers import Shard, StreamConsumer, all_shards, register
from receipts.switches import set_switch
from tasks import broker
from tasks.celery import app
from tests.nodes.containers import WorkerNode
from tests.nodes.process import LocalProcess
from tests.nodes.programs import celery, run
from tests.receipts.conftest import only
from tests.receipts.consuming import StreamUnderTest
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests, wait_until
from tests.tasks.celery_settings import celery_settings
from tests.tasks.deliveries import scalar

BROKERS = ("redis://127.0.0.1:1/0", "amqp://127.0.0.1:1//")
HELD = "SELECT count(*) FROM ledger.shard_lease WHERE lease_token IS NOT NULL"
SHORT = {"CHECKPOINT_INTERVAL_MS": "20", "CHECKPOINT_DRAIN_MS": "80", "CHECKPOINT_CLAIM_IDLE_MS": "1000"}


@pytest.fixture
def no_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_registered", {})


@pytest.fixture
def two_workers(stream: StreamUnderTest, tmp_path: Path) -> Iterator[list[LocalProcess]]:
    """Two workers for the queue `receipts`."""
    running = [
        WorkerNode(
            tmp_path / name,
            *("-n", f"{name}@%h", "-Q", "receipts", "-c", "1", "--without-gossip", "--without-mingle"),
            INGEST_HANDLERS="tests.receipts.stream_consumers",
            REMAP_SIGTERM="SIGQUIT",
            **SHORT,
        ).process
        for name in ("one", "two")
    ]
    for worker in running:
        worker.await_ready()
    yield running
    for worker in running:
        worker.end()


@pytest.mark.guarantee
@only("Redis list")
def test_a_worker_that_is_killed_while_it_holds_a_shard_is_replaced_by_another_one(
    stream: StreamUnderTest, two_workers: list[LocalProcess]
) -> None:
    stream.add(*range(10))
    app.send_task("receipts.consume")
    wait_until(lambda: stream.place.seen() == list(range(10)), "one of the workers consumes")
    pid = int(re.findall(r":(\d+)-", scalar("SELECT holder FROM ledger.shard_lease"))[0])
    first, second = sorted(two_workers, key=lambda worker: worker.pid != psutil.Process(pid).ppid())
    first.kill()
    stream.add(*range(10, 20))

    def is_consumed() -> bool:
        app.send_task("receipts.consume")
        return stream.place.seen() == list(range(20))

    wait_until(is_consumed, "the other worker consumes")
    second.kill("SIGTERM")
    second.popen.wait(20)
    assert scalar(HELD) == 0, "a worker that stops hands over its shard"
    assert stream.unacknowledged() == []


def test_consumers_have_a_queue_of_their_own_and_the_tick_that_starts_them_does_not_use_it() -> None:
    for url in BROKERS:
        config = celery_settings(url)
        (queue,) = [queue for queue in config["task_queues"] if queue.name == "receipts"]
        routes = config["task_routes"]
        assert queue.routing_key == routes["receipts.*"]["routing_key"] == "receipts"
        assert routes["receipts.tick"]["queue"] == "system"
        assert list(routes).index("receipts.tick") < list(routes).index("receipts.*"), "the first match wins"
        entry = config["beat_schedule"]["receipts"]
        assert entry["task"] == "receipts.tick"
        assert 0 < entry["options"]["expires"] <= entry["schedule"]


def test_savers_are_needed_while_receipts_are_on_and_until_the_streams_are_empty(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    assert list(needed_consumers()) == ["save", "deliver"]
    receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    with engine().begin() as connection:
        set_switch(connection, Switch.TWO_PHASE, is_on=False, actor="test")
    assert list(needed_consumers()) == ["save", "deliver"]
    assert save_any_shard(10, until_idle=True)
    assert list(needed_consumers()) == []
    register(StreamConsumer("own", "orders", lambda _: None))
    assert list(needed_consumers()) == ["consume"]


def test_the_embedded_stack_starts_a_worker_for_streams(stack: ServersOfTests) -> None:
    found = roles(stack)
    assert found["receipts"][found["receipts"].index("-Q") + 1] == "receipts"
    assert found["worker"][found["worker"].index("-X") + 1] == "system,receipts"


def test_the_doctor_asks_for_a_worker_for_streams_only_if_there_are_any(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "consumed", lambda **_: {"w@h": {"ingest", "system"}})
    levels = []
    for is_enabled in ("false", "true"):
        monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", is_enabled)
        settings.current.cache_clear()
        levels += [finding.level for finding in workers.check(settings.current()) if finding.name == "queues"]
    assert levels == [Level.OK, Level.FAIL]


def roles(stack: ServersOfTests) -> dict[str, list[str]]:
    return {program.role: list(program.command) for program in plan(stack.home, settings.current()).programs}


def test_a_worker_with_a_claim_idle_time_that_is_too_short_says_why_it_does_not_start(tmp_path: Path) -> None:
    """Otherwise entries would be claimed while their checkpoint is still running, and handled twice."""
    variables = {"CHECKPOINT_INTERVAL_MS": "1000", "CHECKPOINT_DRAIN_MS": "5000", "CHECKPOINT_CLAIM_IDLE_MS": "6000"}
    command = celery("-A", "tasks", "worker", "-Q", "receipts")
    done = run(command, CELERIAC_HOME=str(tmp_path), BROKER_URL=BROKERS[0], **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "celery: CHECKPOINT_CLAIM_IDLE_MS must be more than CHECKPOINT_INTERVAL_MS + CHECKPOINT_DRAIN_MS (6000)."
    )


def test_a_task_without_consumers_ends_at_once(no_consumers: None) -> None:
    assert not consume_module.consume_any_shard(30)


def test_a_task_takes_a_shard_that_is_free(
    stack: ServersOfTests, no_consumers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(StreamConsumer("save", "orders", lambda _batch: None, shards=3))
    taken: list[int] = []

    def take(shard: Shard, _seconds: float) -> bool:
        taken.append(shard.number)
        return len(taken) == 2

    monkeypatch.setattr(consume_module, "consume", take)
    assert consume_module.consume_any_shard(30)
    assert len(set(taken)) == 2
    assert [shard.key for shard in all_shards()] == ["orders:0", "orders:1", "orders:2"]


def test_redis_that_is_unreachable_is_one_line_in_the_log_and_the_shard_is_free(
    stack: ServersOfTests, no_consumers: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    settings.current.cache_clear()
    register(StreamConsumer("save", "orders", lambda _batch: None))
    consume.run()
    (record,) = caplog.records
    assert record.getMessage().startswith("The shard is consumed later: Redis at 127.0.0.1:1 is unreachable")
    assert record.exc_info is None
    assert scalar(HELD) == 0


def test_a_consumer_that_is_registered_twice_is_refused(no_consumers: None) -> None:
    register(StreamConsumer("save", "orders", print))
    register(StreamConsumer("save", "orders", print))
    with pytest.raises(Misuse, match="The consumer 'save' is registered twice"):
        register(StreamConsumer("save", "others", print))


def test_installations_that_share_a_redis_have_groups_of_their_own(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = StreamConsumer("save", "orders", print)
    groups = {Shard.of(consumer, 0).group}
    monkeypatch.setenv("LEDGER_SCHEMA", "other")
    settings.current.cache_clear()
    groups.add(Shard.of(consumer, 0).group)
    assert groups == {"save", "other.save"}


def test_a_shard_is_held_for_a_limited_time_and_then_handed_over(
    stack: ServersOfTests, no_consumers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_BLOCK_MS", "20")
    settings.current.cache_clear()
    consumer = StreamConsumer("save", "orders", lambda _batch: None)
    assert consume_module.consume(Shard.of(consumer, 0), 0.1)
    assert scalar(HELD) == 0
