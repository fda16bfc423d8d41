"""What operators see of receipts: counters, gauges, the shards, and the list of what was rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

import failpoint
import settings
from models.engine import engine, sessions
from models.receipts import Level, Switch
from receipts import chat_messages, stream_metrics
from receipts.chat_messages import ChatMessage
from receipts.deliver import deliver_any_shard
from receipts.save import save_any_shard
from tasks.recovery.prune import prune
from tasks.submission.envelope import NewTask
from tests.outbox.ledger import move
from tests.receipts.accepting import turn
from tests.receipts.log_server import LogServer
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.deliveries import scalar

STREAM = "im:stream:single_chat:accepted"


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def measured() -> dict[str, float]:
    return {
        "accepted": value("celeriac_receipts_total", level="accepted"),
        "saved": value("celeriac_receipts_total", level="saved"),
        "rejected": value("celeriac_receipts_total", level="rejected"),
        "accept times": value("celeriac_receipt_accept_seconds_count"),
        "save lags": value("celeriac_receipt_save_lag_seconds_count"),
        "missed": value("celeriac_receipt_promises_missed_total"),
    }


def test_every_receipt_is_counted_and_the_streams_are_shown(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_PROMISE_SECONDS", "0.0001")
    settings.current.cache_clear()
    before = measured()
    for number in range(3):
        receiving.chat(ChatMessage("ann", "bob", str(number), "hello"))
    receiving.chat(ChatMessage("ann", "bob", "0", "hello"))  # a repetition is not counted
    receiving.task(NewTask("no.such.type"))
    assert stream_metrics.read_streams()[0][0] == ((STREAM,), 3)
    assert save_any_shard(10, until_idle=True)
    lengths, pending = map(dict, stream_metrics.read_streams())
    assert (lengths[STREAM,], pending[STREAM, "save"]) == (0, 0)
    counted = {name: now - before[name] for name, now in measured().items()}
    assert counted == {
        "accepted": 4,
        "saved": 3,
        "rejected": 1,
        "accept times": 4,
        "save lags": 4,
        "missed": 4,
    }


def test_failures_and_duplicates_are_counted_by_kind(receiving: Receiving) -> None:
    def counted() -> list[float]:
        return [value("celeriac_receipt_failures_total", kind=kind) for kind in ("deliver", "save", "duplicate")]

    def failing(place: str, consume: Callable[..., bool]) -> None:
        failpoint.arm(f"{place}=raise")
        with pytest.raises(failpoint.FailpointHit):
            consume(10, until_idle=True)
        failpoint.arm()

    before = counted()
    messages = [ChatMessage("ann", "bob", str(number), "hello") for number in range(3)]
    turn(Switch.DELIVER_BEFORE_SAVED, True)
    for message in messages:
        receiving.chat(message)
    with sessions().begin() as session:
        assert chat_messages.save_now(session, messages[0], ordered=False).level is Level.SAVED
    failing("receipts.before_push", deliver_any_shard)
    assert deliver_any_shard(10, until_idle=True)
    failing("receipts.before_save", save_any_shard)
    assert save_any_shard(10, until_idle=True)
    assert [now - earlier for now, earlier in zip(counted(), before, strict=True)] == [1, 1, 1]
    assert receiving.is_empty()


def test_a_message_that_the_receipt_log_does_not_take_is_a_failure_to_publish(
    log_server: LogServer, receiving: Receiving
) -> None:
    before = value("celeriac_receipt_failures_total", kind="publish")
    log_server.kill()
    assert receiving.chat(ChatMessage("ann", "bob", "1", "hello")).level is Level.SAVED
    assert value("celeriac_receipt_failures_total", kind="publish") == before + 1


def test_receipts_shows_shards_and_rejected_messages(receiving: Receiving) -> None:
    receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    receiving.task(NewTask("no.such.type", {"n": 1}))
    shards = {shard["stream"]: shard for shard in printed("receipts")["shards"]}
    assert (shards[STREAM]["length"], shards[STREAM]["groups"]) == (1, [])
    assert save_any_shard(10, until_idle=True)
    assert all(shard["length"] == 0 for shard in printed("receipts")["shards"])
    assert [each["level"] for each in printed("receipts", "list")] == ["rejected", "saved"]
    (rejected,) = printed("receipts", "list", "--rejected")
    assert (rejected["code"], rejected["kind"]) == ("unknown_type", "tasks")
    assert json.loads(rejected["entry"]["payload"]) == {"n": 1}


def test_switches_are_set_shown_and_returned_to_their_setting(receiving: Receiving) -> None:
    for position, is_on in (("off", False), ("on", True), ("default", True)):
        set_to = printed("receipts", "set", "two-phase", position)["switches"][0]
        assert (set_to["name"], set_to["on"]) == ("two-phase", is_on)
        assert (set_to["setBy"] is None) == (position == "default")
    assert receiving.client.hget("celeriac:receipt-switches", "two_phase") is None


def test_receipts_are_pruned_after_their_retention(
    ledger: ServersOfTests, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_RETENTION_HOURS", "5")
    settings.current.cache_clear()
    receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    assert save_any_shard(10, until_idle=True)
    move(ledger, 3600 * 5 - 60)
    assert prune(engine(), settings.current()).receipts == 0
    move(ledger, 61)
    assert prune(engine(), settings.current()).receipts == 1
    assert scalar("SELECT count(*) FROM ledger.chat_message") == 1


def printed(*arguments: str) -> Any:
    return manage(*arguments, "--json").json
