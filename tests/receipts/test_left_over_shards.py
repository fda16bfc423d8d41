"""RECEIPT_SHARDS is changed while messages are in the streams: every one of them is saved."""

from __future__ import annotations

import pytest

import settings
from checks import receipts as check_receipts
from checks.result import Level as FindingLevel
from models.receipts import Level
from receipts import kinds
from receipts.deliver import deliver_any_shard
from receipts.left_over_shards import MOST_SHARDS, left_over_shards
from receipts.needed_consumers import needed_consumers
from receipts.receipt import Receipt
from receipts.save import save_any_shard
from receipts.shard_states import read_shards, waiting
from receipts.stream_metrics import read_streams
from tests.receipts.accepting import KINDS, accepted, deliver_before_saved
from tests.receipts.orders import numbered
from tests.receipts.receiving import Receiving
from tests.receipts.saving import assert_empty, assert_once

SENDERS = 12
ROUNDS = 60
pytestmark = [pytest.mark.guarantee, pytest.mark.usefixtures("small_batches")]


def use_shards(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Change the setting, as a restart with another value does."""
    monkeypatch.setenv("RECEIPT_SHARDS", str(shards))
    settings.current.cache_clear()


def accept_some(receiving: Receiving) -> list[Receipt]:
    """Accept messages of every kind, and chats of many senders, so that every shard gets some."""
    receipts = [receiving.chat(numbered(f"sender {n}", 0)) for n in range(SENDERS)]
    return receipts + [receipt for kind in KINDS if kind != kinds.CHAT for receipt in accepted(receiving, kind, 3)]


def run_consumers(receiving: Receiving) -> None:
    """Run savers and deliverers as their worker does, until nothing is left."""
    for _ in range(ROUNDS):
        save_any_shard(1, until_idle=True)
        deliver_any_shard(1, until_idle=True)
        if receiving.is_empty():
            return


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (4, 2)])
def test_messages_of_shards_that_a_setting_no_longer_names_are_saved(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    use_shards(monkeypatch, before)
    receipts = accept_some(receiving)
    assert {receipt.level for receipt in receipts} == {Level.ACCEPTED}
    use_shards(monkeypatch, after)
    assert left_over_shards(receiving.client)
    run_consumers(receiving)
    assert_once(receiving, receipts)
    assert left_over_shards(receiving.client) == []


def test_messages_that_were_delivered_before_saved_are_saved_from_shards_that_are_left_over(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_shards(monkeypatch, 3)
    deliver_before_saved()
    receipts = [receiving.chat(numbered(f"sender {n}", 0)) for n in range(SENDERS)]
    assert deliver_any_shard(1, until_idle=True)  # those of one shard are in the second stream now
    use_shards(monkeypatch, 1)
    run_consumers(receiving)
    assert_once(receiving, receipts)


def test_operators_see_shards_that_are_left_over_until_they_are_empty(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_shards(monkeypatch, 2)
    receipts = accept_some(receiving)
    use_shards(monkeypatch, 1)
    keys = {shard.key for shard in left_over_shards(receiving.client)}
    assert keys
    assert {shard.stream for shard in read_shards() if shard.length} == keys
    assert waiting() == len(receipts)
    assert {key for (key,), length in read_streams()[0] if length} == keys
    monkeypatch.setenv("RECEIPT_PROMISE_SECONDS", "0.001")
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    assert list(needed_consumers()) == ["save", "deliver"], "switched off, but not empty"
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()
    late = [each.message for each in check_receipts.check(settings.current()) if each.level is FindingLevel.FAIL]
    assert len(late) == len(keys)
    assert all(any(key in message for message in late) for key in keys)
    run_consumers(receiving)
    assert {shard.stream for shard in read_shards()} == set(kinds.stream_keys())
    assert_empty(receiving)


def test_the_search_covers_every_shard_that_the_setting_allows(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_shards(monkeypatch, MOST_SHARDS)
    receiving.client.xadd(kinds.shard_key(kinds.accepted_stream(kinds.TASKS), MOST_SHARDS - 1), {"x": "y"})
    use_shards(monkeypatch, 1)
    (found,) = left_over_shards(receiving.client)
    assert found.key == f"{kinds.accepted_stream(kinds.TASKS)}:{MOST_SHARDS - 1}"
    use_shards(monkeypatch, MOST_SHARDS)
    assert left_over_shards(receiving.client) == []
    monkeypatch.setenv("RECEIPT_SHARDS", str(MOST_SHARDS + 1))
    with pytest.raises(settings.SettingsError, match="RECEIPT_SHARDS"):
        settings.current.__wrapped__()
