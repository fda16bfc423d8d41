"""Publishers whose server is a RabbitMQ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import amqp as pyamqp
import pytest
from kombu import Connection

from outbox.publishers.amqp import AmqpPublisher
from outbox.publishers.celery import CeleryPublisher
from tests.nodes.containers import RabbitNode
from tests.nodes.process import LocalProcess
from tests.outbox.publishers.case import Case
from tests.tasks.celery_settings import celery_settings

NOBODY = "amqp://guest:guest@127.0.0.1:1//"


@pytest.fixture
def amqp(rabbitmq_vhost: RabbitNode) -> Iterator[Case]:
    """Queue `orders` gets what is published to exchange `shop` with routing key `new`."""
    url = rabbitmq_vhost.url
    with channel(url) as owner:
        declare_anew(owner, "orders")
        owner.exchange_declare("shop", "direct", durable=True, auto_delete=False)
        owner.queue_bind("orders", "shop", "new")

    def arrived() -> list[Any]:
        return [json.loads(message.body)["ids"][0] for message in taken(url, "orders")]

    publisher = AmqpPublisher(url, exchange="shop", routing_key="new")
    yield Case(
        publisher,
        lambda: AmqpPublisher(NOBODY, exchange="shop", routing_key="new"),
        lambda: frozen(rabbitmq_vhost),
        arrived,
    )
    publisher.close()


@pytest.fixture
def celery_on_rabbitmq(rabbitmq_vhost: RabbitNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """With the settings of a process whose BROKER_URL it is: `celeryconfig` reads that once, when it is imported."""
    url = rabbitmq_vhost.url
    celeryconfig = ModuleType("celeryconfig")
    vars(celeryconfig).update(celery_settings(url))
    monkeypatch.setitem(sys.modules, "celeryconfig", celeryconfig)
    with channel(url) as owner:
        owner.queue_delete("ingest")

    def arrived() -> list[Any]:
        return [one for message in taken(url, "ingest") for one in json.loads(message.body)[0][0]]

    publisher = CeleryPublisher("ingest", url)
    yield Case(publisher, lambda: CeleryPublisher("ingest", NOBODY), lambda: frozen(rabbitmq_vhost), arrived)
    publisher.close()


@contextmanager
def channel(url: str) -> Iterator[Any]:
    """As whoever owns the destination."""
    with Connection(url) as connection:
        yield connection.default_channel


def declare_anew(owner: Any, queue: str, **arguments: Any) -> None:
    owner.queue_delete(queue)
    owner.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)


def taken(url: str, queue: str) -> list[pyamqp.Message]:
    """All messages of a queue, which is empty then."""
    with channel(url) as owner:
        return list(iter(lambda: owner.basic_get(queue, no_ack=True), None))


@contextmanager
def frozen(node: RabbitNode) -> Iterator[None]:
    """The whole group: Erlang's machine is a child of the script that started it."""
    process = own_process(node)
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def close_connections(node: RabbitNode) -> None:
    """Those to this vhost, as an operator does it: RabbitMQ says goodbye first."""
    tell_rabbitmq(
        node,
        '[ok = rabbit_networking:close_connection(Pid, "tidying up") || Pid <- rabbit_networking:connections(),'
        f' rabbit_reader:info(Pid, [vhost]) =:= [{{vhost, <<"{node.vhost}">>}}]]',
    )


def tell_rabbitmq(node: RabbitNode, expression: str) -> None:
    """In Erlang, by a program that takes milliseconds; rabbitmqctl takes a second."""
    process = own_process(node)
    cookie = (Path(process.environment["HOME"]) / ".erlang.cookie").read_text()
    done = subprocess.run(
        ["erl_call", "-sname", process.environment["RABBITMQ_NODENAME"], "-c", cookie, "-e"],
        input=f"{expression}.\n",
        env=process.environment,
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith("{ok,"), done.stdout


def own_process(node: RabbitNode) -> LocalProcess:
    if not isinstance(node.process, LocalProcess):
        pytest.skip("RabbitMQ: the server of AMQP_URL is not ours to hurt")
    return node.process
