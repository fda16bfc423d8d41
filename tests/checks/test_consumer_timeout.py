"""The doctor compares the limits of handlers with the consumer timeouts of RabbitMQ, where it can read them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kombu import Connection, Queue

import settings
from checks import consumer_timeout, workers
from checks.consumer_timeout import read_consumer_timeouts
from checks.result import Level
from models.errors import Unreachable
from tests.nodes.containers import RabbitNode
from tests.tasks.deliveries import handled

BROKER = "amqp://me:hunter2@127.0.0.1:1/my%2Fhost"
TOO_LONG = "may run for longer than the consumer_timeout of RabbitMQ"
NOT_FOUND = (404, {"error": "Object Not Found", "reason": "Not Found"})


@contextmanager
def management_api(monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[int, Any]]) -> Iterator[list[str]]:
    """Answer requests for queues as the management API does. Yield a list of the requested paths and logins."""
    seen: list[str] = []

    class Api(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers['Authorization']}")
            status, content = answers.get(self.path.rpartition("/")[2], NOT_FOUND)
            body = json.dumps(content, separators=(",", ":")).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        monkeypatch.setattr(consumer_timeout, "PORT", server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def queue(*, policy: Any = None, arguments: Any = None) -> tuple[int, dict[str, Any]]:
    return 200, {"effective_policy_definition": policy, "arguments": arguments}


def limits(monkeypatch: pytest.MonkeyPatch, broker: str = BROKER) -> list[str]:
    """Return what the doctor says about a handler of 25 minutes in a queue of its own, and one of two hours."""
    monkeypatch.setenv("BROKER_URL", broker)
    with (
        handled("test.slow", lambda _task: None, transactional=False, soft_limit_seconds=1500, queue="slow"),
        handled("test.hours", lambda _task: None, transactional=False, soft_limit_seconds=7200),
    ):
        found = [each for each in workers._check_long_handlers(settings.Settings()) if "test." in each.message]
    assert {(each.name, each.level) for each in found} <= {("handlers.limits", Level.OK)}
    return [each.message.partition(": a worker then")[0] for each in found]


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (queue(policy={"consumer-timeout": 60_000}), 60),
        (queue(arguments={"x-queue-type": "quorum", "x-consumer-timeout": 90_000}), 90),
        (queue(policy={"consumer-timeout": 60_000}, arguments={"x-consumer-timeout": 90_000}), 60),
        (queue(policy={"consumer-timeout": 120_000}, arguments={"x-consumer-timeout": 90_000}), 90),
        (queue(policy={"max-length": 5}, arguments={"x-consumer-timeout": "90000"}), None),  # RabbitMQ ignores text
        (queue(policy=[], arguments={}), None),
        ((200, {}), None),  # before the first statistics
        (NOT_FOUND, None),  # no worker has declared it
    ],
    ids=[
        "policy",
        "argument",
        "policy is smaller",
        "argument is smaller",
        "text",
        "neither",
        "no statistics",
        "no queue",
    ],
)
def test_the_smaller_of_policy_and_argument_is_the_timeout_of_a_queue(
    answer: tuple[int, Any], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with management_api(monkeypatch, {"ingest": answer}) as seen:
        found = read_consumer_timeouts(BROKER, ["ingest", "other"])
    assert found == ({} if seconds is None else {"ingest": seconds})
    login = "Basic bWU6aHVudGVyMg=="
    assert seen == [f"/api/queues/my%2Fhost/ingest {login}", f"/api/queues/my%2Fhost/other {login}"]


def test_a_handler_is_compared_with_the_timeout_of_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with management_api(monkeypatch, {"ingest": queue(), "slow": queue(policy={"consumer-timeout": 1_200_000})}):
        hours, slow = limits(monkeypatch)
    assert slow == f"test.slow {TOO_LONG} (20 minutes by a policy or an argument of its queue)"
    assert hours == f"test.hours {TOO_LONG} (30 minutes unless rabbitmq.conf has another value)"
    with management_api(monkeypatch, {"ingest": queue(policy={"consumer-timeout": 36_000_000})}):
        assert limits(monkeypatch) == []


@pytest.mark.parametrize("status", [401, 404, 500], ids=["no tag", "another program", "broken"])
def test_a_timeout_that_the_management_api_does_not_tell_is_stated_as_the_default(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with management_api(monkeypatch, {"ingest": (status, {"error": "no"})}):
        (only,) = limits(monkeypatch)
    assert only.startswith(f"test.hours {TOO_LONG} (30 minutes by default; ")
    assert f"does not tell it (it answered {status})" in only
    assert "hunter2" not in only


def test_a_closed_port_of_the_management_api_is_stated_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_timeout, "PORT", 1)
    (only,) = limits(monkeypatch)
    assert "(30 minutes by default; the management API of RabbitMQ at 127.0.0.1:1 does not tell it (" in only
    assert "refused" in only


def test_a_silent_management_api_does_not_hold_up_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_timeout, "PATIENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(consumer_timeout, "PORT", silent.getsockname()[1])
        with pytest.raises(Unreachable, match="timed out"):
            read_consumer_timeouts(BROKER, ["ingest", "other"])


def test_the_login_of_an_encrypted_broker_is_never_sent_in_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with management_api(monkeypatch, {"ingest": queue()}) as seen:
        monkeypatch.setattr(consumer_timeout, "TLS_PORT", consumer_timeout.PORT)
        with pytest.raises(Unreachable):
            read_consumer_timeouts(BROKER.replace("amqp:", "amqps:"), ["ingest"])
    assert seen == []


@pytest.mark.guarantee
def test_the_timeout_of_a_queue_is_read_from_a_real_rabbitmq(
    rabbitmq_vhost: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rabbitmq_vhost.management_port is None:
        pytest.skip("RabbitMQ: the management API of AMQP_URL is unknown")
    monkeypatch.setattr(consumer_timeout, "PORT", rabbitmq_vhost.management_port)
    arguments = {"x-queue-type": "quorum", "x-consumer-timeout": 60_000}
    with Connection(rabbitmq_vhost.url) as connection, connection.channel() as channel:
        queue = Queue("with/timeout", channel=channel, queue_arguments=arguments)
        queue.declare()
        try:
            found = read_consumer_timeouts(rabbitmq_vhost.url, ["with/timeout", "never declared"])
        finally:
            queue.delete()
    assert found == {"with/timeout": 60.0}
    with pytest.raises(Unreachable, match="it answered 401"):
        read_consumer_timeouts(rabbitmq_vhost.url.replace("://celeriac:", "://celeriac:wrong"), ["with/timeout"])
