"""What is remembered about tokens while the ledger is unreachable."""

from __future__ import annotations

import asyncio

import pytest

import settings
from api import token_cache
from api.token_cache import TokenCache
from models.errors import Unreachable
from tests.api.callers import make_token
from tests.servers import ServersOfTests

UNREACHABLE = "postgresql://127.0.0.1:1/x"


def test_during_an_outage_a_token_is_trusted_for_as_long_as_the_setting_says(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = make_token("shop")
    monkeypatch.setattr(token_cache, "FRESH_SECONDS", 0.0)
    cache = TokenCache()

    async def ask() -> str:
        return (await cache.authenticate(secret)).name

    async def ask_during_an_outage() -> None:
        assert await ask() == "shop"
        monkeypatch.setenv("DATABASE_URL", UNREACHABLE)
        for seconds in ("60", "0"):
            monkeypatch.setenv("RECEIPT_TOKEN_SECONDS", seconds)
            settings.current.cache_clear()
            if seconds == "60":
                assert await ask() == "shop"
            else:
                with pytest.raises(Unreachable):
                    await ask()

    asyncio.run(ask_during_an_outage())
