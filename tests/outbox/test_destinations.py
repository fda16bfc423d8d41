"""A row names a destination, never an address; the error about a bad address does not show its password."""

from __future__ import annotations

import json

import pytest
import redis

import setting_types
import settings
from outbox import destinations
from outbox.destinations import UnknownDestination, open_destination
from outbox.publishers.amqp import AmqpPublisher
from outbox.publishers.contract import Publisher
from outbox.publishers.kafka import KafkaPublisher
from outbox.publishers.redis_stream import RedisStreamPublisher
from outbox.publishers.webhook import HttpPublisher
from outbox.relay import Relay
from tests.outbox.ledger import insert, rows
from tests.servers import ServersOfTests


def configure(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> settings.Settings:
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps(addresses))
    settings.current.cache_clear()
    return settings.current()


def test_an_event_arrives_in_the_configured_stream(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    url = stack.addresses["REDIS_URL"].replace("redis://", "redis-stream://")
    relay = Relay.of(configure(monkeypatch, orders=f"{url}?stream=shop:orders&dedup=1"))
    insert("orders", 3, payload_sha="same")
    insert("orders", 1, payload_sha="other")
    insert("redis-stream://127.0.0.1:1/0?stream=x")
    ticked = relay.tick()
    relay.close()
    assert ticked.dead == 1  # an address in a row is not a destination
    with redis.Redis.from_url(stack.addresses["REDIS_URL"], decode_responses=True) as client:
        entries = [entry_id for entry_id, _ in client.xrange("shop:orders")]
    sent = rows("external_id", "destination = 'orders'")
    assert {external_id for (external_id,) in sent} <= set(entries)
    assert {status for status, _ in rows(where="destination = 'orders'")} == {"SENT"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("redis-stream://:hunter2@h/0", "names no stream"),
        ("gopher:hunter2@h/0", "scheme must be one of"),
        ("https://[::1/hunter2", "cannot be used"),
        ("amqp://u:hunter2@h/v", "names no exchange"),
        ("amqp://u:hunter2℀@h/", "is not a URL"),
        ("kafka://u:hunter2@h:9092/t", "contains a user"),
        ("kafka://h:9092/?sasl.password=hunter2", "must look like kafka"),
    ],
)
def test_the_error_about_a_bad_address_does_not_show_its_password(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownDestination, match=reason) as refused:
        open_destination("crm", configure(monkeypatch, crm=address))
    assert "hunter2" not in str(refused.value)
    settings.current.cache_clear()


def test_an_address_of_an_unknown_kind_is_refused_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("ftp://u:hunter2@h/x", "gopher://:hunter2@h/0", "hunter2://h"):
        with pytest.raises(settings.SettingsError, match="OUTBOX_DESTINATIONS: the address of 'crm' must begin") as bad:
            configure(monkeypatch, crm=address)
        assert "hunter2" not in bad.value.message
    assert configure(monkeypatch, crm="HTTPS://h/x").outbox_destinations
    settings.current.cache_clear()


def test_the_settings_accept_exactly_the_schemes_that_can_be_opened() -> None:
    assert set(setting_types.DESTINATION_SCHEMES) == set(destinations._OPENERS)


@pytest.mark.parametrize(
    ("address", "publisher"),
    [
        ("redis-stream://h:6379/0?stream=s", RedisStreamPublisher),
        ("amqp://u:p@h/v?exchange=e&routing_key=k", AmqpPublisher),
        ("amqps://u:p@h/v?routing_key=queue", AmqpPublisher),
        ("kafka://h:9092,i:9092/topic?security.protocol=SSL", KafkaPublisher),
        ("https://h/path?secret=s&theirs=1", HttpPublisher),
    ],
)
def test_the_scheme_of_an_address_selects_the_publisher(
    address: str, publisher: type[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_destination("crm", configure(monkeypatch, crm=f"{address}&dedup=1"))
    assert isinstance(opened.publisher, publisher)
    assert opened.dedup
    opened.publisher.close()
    settings.current.cache_clear()
