"""Checks the broker, and the Redis that keeps receipts, which must write to disk before it answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import redis
from kombu import Connection

from checks.result import Finding, Level, expect, fail, ok, warn
from models.errors import Unreachable
from receipts import durability
from settings import Settings, place

OLDEST_REDIS: Final = (6, 2)
CONFIGURE: Final = "set it in redis.conf and with CONFIG SET"


def check_broker(settings: Settings) -> Iterator[Finding]:
    url = settings.broker_url
    if url.partition(":")[0] in ("redis", "rediss"):
        yield from _check_redis("broker", url, {"maxmemory-policy": "noeviction"}, Level.WARN)
    else:
        yield _check_amqp(url)


def check_receipts(settings: Settings) -> Iterator[Finding]:
    yield from _check_redis("receipts", settings.redis_url, durability.WANTED, Level.FAIL)


def _check_redis(name: str, url: str, wanted: dict[str, str], else_: Level) -> Iterator[Finding]:
    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, decode_responses=True) as client:
            version = str(client.info("server")["redis_version"])
            role = client.info("replication")["role"]
            found = {setting: _read_config(client, setting) for setting in wanted}
    except (redis.RedisError, ValueError) as error:
        raise Unreachable(f"Redis at {place(url)} is unreachable: {str(error).rstrip('.')}.") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST_REDIS:
        yield fail(f"{name}.version", f"is {version}", "use Redis 6.2 or newer")
    else:
        yield ok(f"{name}.version", version)
    yield expect(f"{name}.role", role, "master", "use the address of the primary: a replica rejects writes")
    for setting, value in wanted.items():
        if found[setting] is None:
            yield warn(f"{name}.{setting}", "cannot be read", f"make sure that it is {value}")
        else:
            yield expect(f"{name}.{setting}", found[setting], value, CONFIGURE, else_=else_)


def _read_config(client: redis.Redis, setting: str) -> str | None:
    """Return a server's setting, or None where CONFIG is forbidden, as on most hosted servers."""
    try:
        return str(client.config_get(setting)[setting])
    except (redis.ResponseError, KeyError):
        return None


def _check_amqp(url: str) -> Finding:
    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            properties = connection.connection.server_properties
            return ok("broker", f"{properties.get('product')} {properties.get('version')}")
    except Exception as error:  # each of kombu's transports raises its own kinds of errors
        raise Unreachable(f"RabbitMQ at {place(url)} is unreachable: {error}.") from None
