"""The broker and the receipt log are configured differently, and a missing Redis binary is explained to the user."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import settings
from embedded.redis import RedisUnusable, find_server
from tests.servers import ServersOfTests


def config(url: str, *names: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return [client.config_get(name)[name] for name in names]


def test_the_receipt_log_writes_to_disk_before_it_answers(servers: ServersOfTests) -> None:
    names = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy", "bind")
    assert config(servers.addresses["REDIS_URL"], *names) == ["yes", "always", "no", "noeviction", "127.0.0.1"]


def test_the_broker_writes_nothing_to_disk(servers: ServersOfTests) -> None:
    assert config(servers.addresses["BROKER_URL"], "appendonly", "save", "bind") == ["no", "", "127.0.0.1"]


def test_both_servers_require_the_generated_password(servers: ServersOfTests) -> None:
    for variable in ("BROKER_URL", "REDIS_URL"):
        url = servers.addresses[variable].replace(servers.home.secrets["redis"], "guess")
        with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def program(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def _without_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("_without_package")
def test_a_valkey_on_the_path_is_used_without_the_package(tmp_path: Path) -> None:
    program(tmp_path / "redis-server", "Redis server v=5.0.14 sha=0 bits=64")
    valkey = program(tmp_path / "valkey-server", "Server v=7.2.5 sha=0 bits=64")
    assert find_server() == valkey


@pytest.mark.usefixtures("_without_package")
def test_a_platform_without_redis_gets_a_hint(tmp_path: Path) -> None:
    program(tmp_path / "redis-server", "Redis server v=5.0.14 sha=0 bits=64")
    with pytest.raises(RedisUnusable, match=r"5\.0\.14.*CELERIAC_REDIS_SERVER.*BROKER_URL and REDIS_URL"):
        find_server()


def test_a_setting_can_name_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = program(tmp_path / "my-redis", "Redis server v=7.4.1 sha=0 bits=64")
    monkeypatch.setenv("CELERIAC_REDIS_SERVER", str(named))
    settings.current.cache_clear()
    assert find_server() == named
    monkeypatch.setenv("CELERIAC_REDIS_SERVER", str(tmp_path / "missing"))
    settings.current.cache_clear()
    with pytest.raises(RedisUnusable, match="not a program"):
        find_server()
