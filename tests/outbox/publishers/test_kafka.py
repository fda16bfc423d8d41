"""The publisher to Kafka."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Sent
from outbox.publishers.kafka import KafkaPublisher
from tests.nodes.kafka import INIT_PRODUCER_ID, PRODUCE, KafkaCluster
from tests.outbox.publishers.case import Case, events
from tests.servers import wait_until

CANARY = "canary-7f3a"
PATIENCE = "outbox.publishers.contract.PATIENCE_SECONDS"


@pytest.fixture
def with_options(
    kafka_cluster: KafkaCluster, kafka_topic: str
) -> Iterator[Callable[[Mapping[str, str]], KafkaPublisher]]:
    made: list[KafkaPublisher] = []

    def make(options: Mapping[str, str]) -> KafkaPublisher:
        made.append(KafkaPublisher(kafka_cluster.bootstrap_servers, kafka_topic, options=options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def event(payload: Any, *, key: str | None = None, headers: Mapping[str, Any] | None = None) -> ClaimedEvent:
    return replace(events("any")[0], payload=payload, ordering_key=key, headers=headers or {})


def kinds(results: Any) -> list[type]:
    return [type(result) for result in results]


def test_a_record_has_the_key_payload_and_headers_of_its_event(
    kafka: Case, kafka_cluster: KafkaCluster, kafka_topic: str
) -> None:
    headers = {"kind": "naïve", "tries": 3, "event-id": "of another event"}
    given = replace(event({"a": [1, "é\ud800"]}, key="customer 7", headers=headers), id=41)
    (result,) = kafka.publisher.publish([given])
    (record,) = kafka_cluster.records(kafka_topic)
    assert record.key() == b"customer 7"
    assert record.value() == '{"a":[1,"é\\ud800"]}'.encode()
    assert sorted(record.headers() or []) == [("event-id", b"41"), ("kind", "naïve".encode()), ("tries", b"3")]
    assert result == Sent(f"{kafka_topic}/{record.partition()}/{record.offset()}")


def test_events_of_one_key_are_in_one_partition_in_their_order(
    kafka: Case, kafka_cluster: KafkaCluster, kafka_topic: str
) -> None:
    for batch in range(5):
        given = [event({"ids": [batch * 20 + n]}, key=f"key {n % 4}") for n in range(20)]
        assert kinds(kafka.publisher.publish(given)) == [Sent] * 20
    by_key: dict[bytes | None, list[tuple[int | None, int]]] = {}
    for record in kafka_cluster.records(kafka_topic):
        by_key.setdefault(record.key(), []).append((record.partition(), json.loads(record.value() or b"")["ids"][0]))
    assert len(by_key) == 4
    for found in by_key.values():
        assert len({partition for partition, _ in found}) == 1
        assert [n for _, n in found] == sorted(n for _, n in found)


def test_events_without_a_key_are_spread_over_the_partitions(
    kafka: Case, kafka_cluster: KafkaCluster, kafka_topic: str
) -> None:
    kafka.publisher.publish(events(*map(str, range(60))))
    assert {record.partition() for record in kafka_cluster.records(kafka_topic)} == {0, 1, 2}


def test_an_event_that_is_too_large_is_refused_and_the_others_arrive(kafka: Case) -> None:
    before, after = events("before", "after")
    results = kafka.publisher.publish([before, event("x" * 2_000_000), after])
    assert kinds(results) == [Sent, Refused, Sent]
    assert sorted(kafka.arrived()) == ["after", "before"]


@pytest.mark.parametrize("verdict", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD])
def test_records_that_kafka_rejected_together_are_sent_again_one_by_one(
    kafka: Case, kafka_cluster: KafkaCluster, verdict: int
) -> None:
    kafka_cluster.fail_requests(PRODUCE, [verdict] * 3)  # the first request of each partition
    assert kinds(kafka.publisher.publish(events(*map(str, range(30))))) == [Sent] * 30
    assert sorted(map(int, kafka.arrived())) == list(range(30))


@pytest.mark.parametrize("verdict", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD])
def test_an_event_that_kafka_rejects_alone_is_refused(kafka: Case, kafka_cluster: KafkaCluster, verdict: int) -> None:
    kafka_cluster.fail_requests(PRODUCE, [verdict])
    assert kinds(kafka.publisher.publish(events("bad"))) == [Refused]
    assert kinds(kafka.publisher.publish(events("good"))) == [Sent]


def test_a_record_that_kafka_already_has_is_sent_and_options_cannot_switch_off_idempotence(
    kafka_cluster: KafkaCluster, with_options: Callable[[Mapping[str, str]], KafkaPublisher]
) -> None:
    """Only an idempotent producer treats DUPLICATE_SEQUENCE_NUMBER as a success."""
    publisher = with_options({"enable.idempotence": "false", "acks": "1", "message.timeout.ms": "600000"})
    publisher.publish(events("first"))
    kafka_cluster.fail_requests(PRODUCE, [KafkaError.DUPLICATE_SEQUENCE_NUMBER])
    assert publisher.publish(events("sent before, confirmation lost")) == [Sent(None)]


def test_a_producer_with_a_broken_sequence_is_replaced(kafka: Case, kafka_cluster: KafkaCluster) -> None:
    kafka.publisher.publish(events("before"))
    kafka_cluster.fail_requests(PRODUCE, [KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER] * 10)
    results = kafka.publisher.publish(events(*map(str, range(10))))
    assert kinds(results) == [Failed] * 10
    assert all("OUT_OF_ORDER_SEQUENCE_NUMBER" in result.error for result in results if isinstance(result, Failed))
    kafka_cluster.fail_requests(PRODUCE, [])
    assert kinds(kafka.publisher.publish(events("after"))) == [Sent]


def test_events_confirmed_after_a_fatal_error_of_the_producer_are_sent() -> None:
    names = [f"event {n:02}" for n in range(60)]
    cluster = KafkaCluster()
    cluster.make_topic("orders", partitions=3)
    cluster.set_leaders("orders", [1, 2, 3])
    publisher = KafkaPublisher(cluster.bootstrap_servers, "orders")
    assert kinds(publisher.publish(events(*names))) == [Sent] * 60
    cluster.delay_request(1, PRODUCE, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, milliseconds=100)
    cluster.delay_request(2, PRODUCE, 0, milliseconds=300)
    results = publisher.publish(events(*names))
    assert set(kinds(results)) == {Sent, Failed}
    assert len(cluster.records("orders")) == 60 + kinds(results).count(Sent)
    cluster.end()


def test_events_fail_with_the_reason_if_kafka_does_not_permit_an_idempotent_producer(
    kafka: Case, kafka_cluster: KafkaCluster
) -> None:
    kafka.publisher.close()
    kafka_cluster.fail_requests(INIT_PRODUCER_ID, [KafkaError.CLUSTER_AUTHORIZATION_FAILED])
    (result,) = kafka.publisher.publish(events("one"))
    assert isinstance(result, Failed)
    assert "CLUSTER_AUTHORIZATION_FAILED" in result.error
    assert kinds(kafka.publisher.publish(events("one"))) == [Sent]


def test_records_are_sent_again_within_the_call_after_temporary_errors(
    kafka: Case, kafka_cluster: KafkaCluster
) -> None:
    cut = KafkaError._TRANSPORT
    kafka_cluster.fail_requests(PRODUCE, [cut, KafkaError.NOT_ENOUGH_REPLICAS, cut])
    assert kinds(kafka.publisher.publish(events("one"))) == [Sent]
    assert kafka.arrived() == ["one"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads from Linux which requests the brokers have not read")
def test_a_pause_of_the_cluster_during_a_batch_causes_no_duplicates(kafka: Case, kafka_cluster: KafkaCluster) -> None:
    names = [f"event {n:03}" for n in range(200)]
    kafka.publisher.publish(events("before"))
    with ThreadPoolExecutor(1) as pool:
        with kafka.hanging():
            under_way = pool.submit(kafka.publisher.publish, events(*names))
            wait_until(kafka_cluster.has_unread_requests, "the batch was sent")
            assert not under_way.done()
        assert kinds(under_way.result()) == [Sent] * 200
    assert sorted(kafka.arrived()) == ["before", *names]


def test_no_record_of_an_abandoned_batch_arrives_later(kafka: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka.publisher.close()
    with monkeypatch.context() as impatient, kafka.hanging():
        impatient.setattr(PATIENCE, 0.5)
        with pytest.raises(DestinationDown):
            kafka.publisher.publish([event("x" * 2_000_000), *events("abandoned before there was a connection")])
    assert kinds(kafka.publisher.publish(events("after"))) == [Sent]
    assert kafka.arrived() == ["after"]


def test_a_killed_cluster_is_down_and_publishers_to_other_clusters_go_on(
    kafka: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = KafkaCluster(brokers=1)
    publisher = KafkaPublisher(cluster.bootstrap_servers, "orders")
    assert kinds(publisher.publish(events("before"))) == [Sent]
    cluster.kill()
    with monkeypatch.context() as impatient:
        impatient.setattr(PATIENCE, 0.5)
        with pytest.raises(DestinationDown):
            publisher.publish(events("lost"))
    assert kinds(kafka.publisher.publish(events("elsewhere"))) == [Sent]


def test_an_unreachable_broker_fails_only_the_events_of_its_partitions(
    kafka: Case, kafka_cluster: KafkaCluster, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"event {n:02}" for n in range(60)]
    kafka_cluster.set_leaders(kafka_topic, [1, 2, 3])
    kafka.publisher.publish(events("before"))
    with kafka_cluster.without_broker(1), monkeypatch.context() as impatient:
        impatient.setattr(PATIENCE, 1.0)
        *results, too_large = kafka.publisher.publish([*events(*names), event("x" * 2_000_000)])
    assert set(kinds(results)) == {Sent, Failed}
    assert isinstance(too_large, Refused)
    sent = [name for name, result in zip(names, results, strict=True) if isinstance(result, Sent)]
    assert sorted(kafka.arrived()) == ["before", *sent]
    assert kinds(kafka.publisher.publish(events("after"))) == [Sent]


def test_events_wait_for_space_in_the_producers_queue(
    kafka: Case, with_options: Callable[[Mapping[str, str]], KafkaPublisher]
) -> None:
    names = [f"event {n:03}" for n in range(250)]
    publisher = with_options({"queue.buffering.max.messages": "7"})
    assert kinds(publisher.publish(events(*names))) == [Sent] * 250
    assert sorted(kafka.arrived()) == names


def test_events_that_find_no_space_in_the_queue_in_time_are_not_tried(
    kafka_cluster: KafkaCluster,
    kafka_topic: str,
    with_options: Callable[[Mapping[str, str]], KafkaPublisher],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka_cluster.set_leaders(kafka_topic, [1, 2, 3])
    publisher = with_options({"queue.buffering.max.messages": "5"})
    publisher.publish(events(*map(str, range(30))))
    with kafka_cluster.without_broker(1):
        monkeypatch.setattr(PATIENCE, 1.0)
        found = kinds(publisher.publish(events(*map(str, range(100)))))
    assert found.count(Sent) > 0
    assert found.count(Failed) == 5
    assert found.count(NotTried) == 95 - found.count(Sent)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "Kafka has no topic"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_events_fail_while_a_topic_is_unusable_and_arrive_afterwards(
    kafka: Case, kafka_cluster: KafkaCluster, kafka_topic: str, code: int, sentence: str
) -> None:
    kafka_cluster.fail_topic(kafka_topic, code)
    for result in kafka.publisher.publish(events("one", "two")):
        assert isinstance(result, Failed)
        assert sentence in result.error
    kafka_cluster.fail_topic(kafka_topic, 0)
    assert kinds(kafka.publisher.publish(events("one", "two"))) == [Sent, Sent]


@pytest.mark.parametrize(
    "options",
    [
        {"sasl.passwort": CANARY},
        {"security.protocol": CANARY},
        {"ssl.key.pem": CANARY, "security.protocol": "ssl"},
        {"stats_cb": CANARY},
        {"delivery.report.only.error": CANARY},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_error_about_a_bad_option_names_it_without_its_value(
    with_options: Callable[[Mapping[str, str]], KafkaPublisher],
    options: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    (result,) = with_options(options).publish(events("one"))
    assert isinstance(result, Failed)
    assert next(iter(options)) in result.error
    assert CANARY not in result.error + caplog.text


def test_an_address_with_a_password_is_neither_used_nor_shown(kafka_topic: str) -> None:
    (result,) = KafkaPublisher(f"user:{CANARY}@127.0.0.1:1", kafka_topic).publish(events("one"))
    assert isinstance(result, Failed)
    assert "sasl.password" in result.error
    assert CANARY not in result.error


def test_no_error_and_no_log_shows_a_password(
    with_options: Callable[[Mapping[str, str]], KafkaPublisher],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(PATIENCE, 1.0)
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "celeriac", "sasl.password": CANARY}
    publisher = with_options({"security.protocol": "sasl_plaintext", **login, "debug": "conf,security,broker"})
    with pytest.raises(DestinationDown, match="SASL") as down:
        publisher.publish(events("one"))
    assert "sasl.password" in caplog.text, "librdkafka logs its configuration"
    assert CANARY not in caplog.text + str(down.value)


def test_messages_of_librdkafka_are_logged_and_not_printed(
    kafka: Case,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    kafka_cluster: KafkaCluster,
) -> None:
    monkeypatch.setattr(PATIENCE, 1.0)
    with pytest.raises(DestinationDown, match="Connection refused"):
        kafka.unreachable().publish(events("one"))
    assert "Connection refused" not in caplog.text, "only the error says it"
    monkeypatch.undo()
    kafka_cluster.fail_requests(PRODUCE, [KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER] * 10)
    assert kinds(kafka.publisher.publish(events("one"))) == [Failed]
    assert [record.levelname for record in caplog.records if "out of order" in record.message] == ["CRITICAL"]
    assert capfd.readouterr() == ("", "")


def test_a_forked_process_publishes_with_its_own_producer(kafka: Case) -> None:
    kafka.publisher.publish(events("parent"))
    child = os.fork()
    if not child:
        try:
            os._exit(0 if kinds(kafka.publisher.publish(events("child"))) == [Sent] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kinds(kafka.publisher.publish(events("parent again"))) == [Sent]
    assert sorted(kafka.arrived()) == ["child", "parent", "parent again"]
