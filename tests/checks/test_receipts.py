"""The doctor notices receipts that are not saved in time, and keys that others can read."""

from __future__ import annotations

from pathlib import Path

import pytest

import settings
from checks import receipts
from checks.result import Level
from receipts.chat_messages import ChatMessage
from receipts.keys import key_folder
from receipts.save import save_any_shard
from tests.receipts.conftest import receiving  # noqa: F401 - a fixture
from tests.receipts.receiving import Receiving


def test_messages_that_wait_for_longer_than_promised_fail(
    receiving: Receiving,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RECEIPT_PROMISE_SECONDS", "0.001")
    settings.current.cache_clear()
    receiving.chat(ChatMessage("ann", "bob", "1", "hello"))
    (finding,) = receipts.check(settings.current())
    assert (finding.name, finding.level) == ("receipts.lag", Level.FAIL)
    assert "1 entries wait in im:stream:single_chat:accepted" in finding.message
    assert save_any_shard(10, until_idle=True)
    (finding,) = receipts.check(settings.current())
    assert finding.level is Level.OK


def test_keys_that_other_users_can_read_are_a_warning(
    receiving: Receiving,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RECEIPT_KEYS", str(tmp_path / "keys"))
    settings.current.cache_clear()
    key_folder().signing_key()
    assert [finding.level for finding in receipts.check(settings.current())] == [Level.OK]
    (private,) = (tmp_path / "keys").glob("*.pem")
    private.chmod(0o644)
    assert [finding.level for finding in receipts.check(settings.current())] == [Level.OK, Level.WARN]
