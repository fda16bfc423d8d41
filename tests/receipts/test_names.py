"""The names of streams and consumer groups come from the settings, so that two chats can share a Redis."""

from __future__ import annotations

import pytest

import settings
from models.receipts import Switch
from receipts import kinds
from receipts.chat_messages import ChatMessage
from receipts.deliver import deliver_any_shard
from receipts.save import save_any_shard
from tests.receipts.accepting import turn
from tests.receipts.receiving import Receiving
from tests.receipts.saving import groups
from tests.tasks.deliveries import scalar

NAMES = {
    "RECEIPT_STREAM_ACCEPTED": "shop:accepted",
    "RECEIPT_STREAM_TO_SAVE": "shop:to_save",
    "RECEIPT_GROUP_DELIVER": "shop-deliver",
    "RECEIPT_GROUP_SAVE": "shop-save",
}


def test_streams_and_groups_have_the_names_of_the_settings(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    turn(Switch.DELIVER_BEFORE_SAVED, True)
    receiving.reconnect()
    receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    assert receiving.streams() == {"shop:accepted": 1}
    assert deliver_any_shard(10, until_idle=True)
    assert receiving.streams() == {"shop:to_save": 1}
    assert save_any_shard(10, until_idle=True)
    assert scalar("SELECT body FROM ledger.chat_message") == "hello"
    assert {("shop:accepted", "shop-deliver"), ("shop:to_save", "shop-save")} <= set(groups(receiving.client))


def test_senders_are_spread_over_as_many_shards_as_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [f"user {number}" for number in range(200)]
    for shards in (1, 4):
        monkeypatch.setenv("RECEIPT_SHARDS", str(shards))
        settings.current.cache_clear()
        found = [kinds.shard_of(sender) for sender in senders]
        assert set(found) == set(range(shards))
        assert found == [kinds.shard_of(sender) for sender in senders]
