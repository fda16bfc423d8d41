"""The publisher to a RabbitMQ exchange."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outbox.publishers.amqp import HEADERS_LIMIT, AmqpPublisher
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent
from tests.nodes.containers import RabbitNode
from tests.nodes.rabbitmq import LARGEST_MESSAGE
from tests.outbox.publishers.case import Case, events
from tests.outbox.publishers.proxy import Proxy, proxy_of
from tests.outbox.publishers.rabbitmq_cases import (
    channel,
    close_connections,
    own_process,
    replace_queue,
    taken,
    tell_rabbitmq,
)
from tests.servers import wait_until

pytestmark = pytest.mark.guarantee
CANARY = "canary-6d1f"


def test_id_and_headers_arrive_and_no_header_changes_the_routing(amqp: Case, rabbitmq_vhost: RabbitNode) -> None:
    headers = {"routing_key": "elsewhere", "größe": 2**40, "list": [1, None, {"x": 1.5}], "yes": True}
    (event,) = events("one")
    assert amqp.publisher.publish([replace(event, id=4711, headers=headers)]) == [Sent()]
    (message,) = taken(rabbitmq_vhost.url, "orders")
    assert message.properties == {
        "message_id": "4711",
        "application_headers": headers,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "delivery_mode": 2,
    }
    assert json.loads(message.body) == event.payload


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_headers_that_rabbitmq_would_use_as_routing_keys_are_refused(
    name: str, amqp: Case, rabbitmq_vhost: RabbitNode
) -> None:
    with channel(rabbitmq_vhost.url) as owner:
        replace_queue(owner, "elsewhere")
        owner.queue_bind("elsewhere", "shop", "elsewhere")
    bad, good = events("bad", "good")
    refused, sent = amqp.publisher.publish([replace(bad, headers={name: ["elsewhere"]}), good])
    assert (type(refused), sent) == (Refused, Sent())
    assert amqp.arrived() == ["good"]
    assert not taken(rabbitmq_vhost.url, "elsewhere")


@pytest.mark.parametrize("headers", [{"k" * 256: 1}, {"number": 2**63}, {"text": "x" * HEADERS_LIMIT}])
def test_headers_that_do_not_fit_fail_only_their_own_event(headers: dict[str, Any], amqp: Case) -> None:
    bad, good = events("bad", "good")
    refused, sent = amqp.publisher.publish([replace(bad, headers=headers), good])
    assert (type(refused), sent) == (Refused, Sent())
    assert amqp.arrived() == ["good"]


def test_headers_that_just_fit_arrive(amqp: Case) -> None:
    (event,) = events("one")
    assert amqp.publisher.publish([replace(event, headers={"text": "x" * (HEADERS_LIMIT - 20)})]) == [Sent()]


def test_an_event_without_a_bound_queue_fails_and_the_others_arrive(amqp: Case, rabbitmq_vhost: RabbitNode) -> None:
    with channel(rabbitmq_vhost.url) as owner:
        owner.exchange_declare("by-kind", "headers", durable=True, auto_delete=False)
        owner.queue_bind("orders", "by-kind", arguments={"kind": "order"})
    batch = [replace(event, headers={"kind": "order"}) if n % 2 else event for n, event in enumerate(events(*"abcdef"))]
    with publishing(rabbitmq_vhost.url, exchange="by-kind") as publisher:
        results = publisher.publish(batch)
    assert [type(result) for result in results] == [Failed, Sent] * 3
    assert "No queue is bound" in error_of(results[0])
    assert amqp.arrived() == ["b", "d", "f"]


def test_events_that_a_full_queue_rejects_fail(rabbitmq_vhost: RabbitNode) -> None:
    with channel(rabbitmq_vhost.url) as owner:
        replace_queue(owner, "small", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with publishing(rabbitmq_vhost.url, routing_key="small") as publisher:
        results = publisher.publish(events("first", "second", "third"))
    assert [type(result) for result in results] == [Sent, Failed, Failed]
    assert "nack" in error_of(results[1])


def test_events_fail_while_the_exchange_is_missing_and_arrive_after_it_is_declared(rabbitmq_vhost: RabbitNode) -> None:
    url = rabbitmq_vhost.url
    with channel(url) as owner:
        replace_queue(owner, "orders")
        owner.exchange_delete("later")
    with publishing(url, exchange="later", routing_key="new") as publisher:
        results = publisher.publish(events(*(f"event {n}" for n in range(300))))
        assert {type(result) for result in results} == {Failed}
        assert "no exchange 'later'" in error_of(results[0])
        with channel(url) as owner:
            owner.exchange_declare("later", "direct", durable=True, auto_delete=False)
            owner.queue_bind("orders", "later", "new")
        assert publisher.publish(events("after")) == [Sent()]
    assert len(taken(url, "orders")) == 1


def test_an_event_that_makes_rabbitmq_close_the_channel_fails_alone(amqp: Case, rabbitmq_vhost: RabbitNode) -> None:
    own_process(rabbitmq_vhost)
    before, bad, after = events("before", "bad", "after")
    results = amqp.publisher.publish([before, replace(bad, payload={"ids": ["x" * LARGEST_MESSAGE]}), after])
    assert [type(result) for result in results] == [Sent, Refused, Sent]
    assert "larger than" in error_of(results[1])
    assert set(amqp.arrived()) == {"before", "after"}


def test_a_thousand_events_are_written_before_the_first_confirm_is_awaited(amqp: Case, proxy: Proxy) -> None:
    """The proxy delays all answers until the last event has passed: waiting for each confirm would time out."""
    names = [f"event {n:04}" for n in range(1000)]
    with publishing(proxy.url, exchange="shop", routing_key="new") as publisher:
        publisher.publish(events("opens the connection"))
        proxy.hold_answers_until(names[-1])
        assert set(publisher.publish(events(*names))) == {Sent()}
    assert amqp.arrived()[1:] == names


def test_a_connection_lost_while_idle_is_opened_again_and_no_event_fails(amqp: Case, proxy: Proxy) -> None:
    with publishing(proxy.url, exchange="shop", routing_key="new") as publisher:
        publisher.publish(events("before"))
        proxy.hang_up()
        assert publisher.publish(events("after 1", "after 2")) == [Sent(), Sent()]
    assert amqp.arrived() == ["before", "after 1", "after 2"]


def test_a_connection_that_rabbitmq_closed_while_idle_is_opened_again_and_no_event_fails(
    amqp: Case, rabbitmq_vhost: RabbitNode
) -> None:
    amqp.publisher.publish(events("before"))
    close_connections(rabbitmq_vhost)
    assert amqp.publisher.publish(events("after 1", "after 2")) == [Sent(), Sent()]
    assert amqp.arrived() == ["before", "after 1", "after 2"]


def test_events_confirmed_before_the_connection_was_lost_are_sent_and_the_others_are_released(
    amqp: Case, proxy: Proxy
) -> None:
    with publishing(proxy.url, exchange="shop", routing_key="new") as publisher:
        publisher.publish(events("opens the connection"))
        proxy.lose_everything_from("second")
        assert publisher.publish(events("first", "second", *"abcdefgh")) == [Sent()] + [NotTried()] * 9
    assert amqp.arrived() == ["opens the connection", "first"]


def test_a_destination_is_down_if_the_connection_is_lost_before_any_answer(amqp: Case, proxy: Proxy) -> None:
    with publishing(proxy.url, exchange="shop", routing_key="new") as publisher:
        publisher.publish(events("opens the connection"))
        proxy.hang_up_at("second")
        with pytest.raises(DestinationDown):
            publisher.publish(events("first", "second"))


def test_a_destination_is_down_during_an_alarm_and_nothing_more_is_written(
    amqp: Case, rabbitmq_vhost: RabbitNode
) -> None:
    """RabbitMQ announces an alarm only to publishers, and delivers their first message after the alarm."""
    amqp.publisher.publish(events("before"))
    with alarm(rabbitmq_vhost):
        for probe in ("probe 1", "probe 2", "probe 3"):
            with pytest.raises(DestinationDown, match="short of memory or disk"):
                amqp.publisher.publish(events(probe))
    wait_until(lambda: is_sent(amqp, "after"), "RabbitMQ accepts messages again")
    assert sorted(amqp.arrived()) == ["after", "before", "probe 1"]


@pytest.mark.parametrize("what", ["login", "vhost"])
def test_a_refused_login_is_reported_without_the_password(what: str, rabbitmq_vhost: RabbitNode) -> None:
    url = rabbitmq_vhost.url
    user, _, place = url.removeprefix("amqp://").partition("@")
    wrong = {"login": f"amqp://{CANARY}:{CANARY}@{place}", "vhost": f"amqp://{user}@{place}-unknown"}[what]
    with publishing(wrong) as publisher, pytest.raises(DestinationDown) as down:
        publisher.publish(events("one"))
    assert {"login": "ACCESS_REFUSED", "vhost": "NOT_ALLOWED"}[what] in str(down.value)
    assert CANARY not in repr(down.value)
    assert user.partition(":")[2] not in repr(down.value)


@pytest.mark.parametrize("url", [f"amqp://u:{CANARY}#@h/", f"amqp://u@h:{CANARY}/", f"http://u:{CANARY}@h/"])
def test_the_error_about_a_bad_address_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="it") as refused:
        AmqpPublisher(url, exchange="", routing_key="q")
    assert CANARY not in repr(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_amqps_checks_the_host_name_and_trusts_the_certificates_of_the_system(
    amqp: Case, rabbitmq_vhost: RabbitNode, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with proxy_of(rabbitmq_vhost.url, tls) as proxy:
        named = proxy.url.replace("amqp://", "amqps://").replace("127.0.0.1", "localhost")
        for url, trusted, reason in (
            (named, False, "self-signed certificate"),
            (named.replace("localhost", "127.0.0.1"), True, "IP address mismatch"),
        ):
            with monkeypatch.context() as environment, publishing(url, exchange="shop", routing_key="new") as publisher:
                environment.setenv("SSL_CERT_FILE", str(certificate) if trusted else "")
                with pytest.raises(DestinationDown, match=reason):
                    publisher.publish(events("lost"))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        names = [f"event {n}" for n in range(300)]
        with publishing(named, exchange="shop", routing_key="new") as publisher:
            assert set(publisher.publish(events(*names))) == {Sent()}
            proxy.hang_up()
            assert publisher.publish(events("after")) == [Sent()]
    assert amqp.arrived() == [*names, "after"]


@pytest.fixture
def proxy(rabbitmq_vhost: RabbitNode) -> Iterator[Proxy]:
    with proxy_of(rabbitmq_vhost.url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a self-signed certificate of localhost."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    subprocess.run(
        ["openssl", "req", "-x509", *key, *names, "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


@contextmanager
def publishing(url: str, *, exchange: str = "", routing_key: str = "orders") -> Iterator[AmqpPublisher]:
    publisher = AmqpPublisher(url, exchange=exchange, routing_key=routing_key)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def alarm(node: RabbitNode) -> Iterator[None]:
    tell_rabbitmq(node, "rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []}), rabbit_alarm:get_alarms()")
    try:
        yield
    finally:
        tell_rabbitmq(node, "rabbit_alarm:clear_alarm({resource_limit, memory, node()}), rabbit_alarm:get_alarms()")


def is_sent(case: Case, name: str) -> bool:
    try:
        return case.publisher.publish(events(name)) == [Sent()]
    except DestinationDown:
        return False


def error_of(result: Result) -> str:
    assert isinstance(result, Failed | Refused)
    return result.error
