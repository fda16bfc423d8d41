"""Publishers to RabbitMQ."""

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
import psutil
import pytest
from kombu import Connection

from outbox.publishers.amqp import AmqpPublisher
from outbox.publishers.celery import CeleryPublisher
from tests.nodes.containers import RabbitNode
from tests.nodes.process import LocalProcess
from tests.outbox.publishers.case import Case, wait_until_stopped
from tests.tasks.celery_settings import celery_settings

UNREACHABLE = "amqp://guest:guest@127.0.0.1:1//"


@pytest.fixture
def amqp(rabbitmq_vhost: RabbitNode) -> Iterator[Case]:
    """A publisher to exchange `shop` with routing key `new`, which is bound to queue `orders`."""
    url = rabbitmq_vhost.url
    with channel(url) as owner:
        replace_queue(owner, "orders")
        owner.exchange_declare("shop", "direct", durable=True, auto_delete=False)
        owner.queue_bind("orders", "shop", "new")

    def arrived() -> list[Any]:
        return [json.loads(message.body)["ids"][0] for message in taken(url, "orders")]

    publisher = AmqpPublisher(url, exchange="shop", routing_key="new")
    yield Case(
        publisher,
        lambda: AmqpPublisher(UNREACHABLE, exchange="shop", routing_key="new"),
        lambda: frozen(rabbitmq_vhost),
        arrived,
    )
    publisher.close()


@pytest.fixture
def celery_on_rabbitmq(rabbitmq_vhost: RabbitNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A publisher in a process whose BROKER_URL is RabbitMQ: `celeryconfig` reads it once, when it is imported."""
    url = rabbitmq_vhost.url
    celeryconfig = ModuleType("celeryconfig")
    vars(celeryconfig).update(celery_settings(url))
    monkeypatch.setitem(sys.modules, "celeryconfig", celeryconfig)
    with channel(url) as owner:
        owner.queue_delete("ingest")

    def arrived() -> list[Any]:
        return [one for message in taken(url, "ingest") for one in json.loads(message.body)[0][0]]

    publisher = CeleryPublisher("ingest", url)
    yield Case(publisher, lambda: CeleryPublisher("ingest", UNREACHABLE), lambda: frozen(rabbitmq_vhost), arrived)
    publisher.close()


@contextmanager
def channel(url: str) -> Iterator[Any]:
    """Open a channel as the owner of the destination."""
    with Connection(url) as connection:
        yield connection.default_channel


def replace_queue(owner: Any, queue: str, **arguments: Any) -> None:
    """Delete a queue, if it exists, and declare it again."""
    owner.queue_delete(queue)
    owner.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)


def taken(url: str, queue: str) -> list[pyamqp.Message]:
    """Take all messages from a queue."""
    with channel(url) as owner:
        return list(iter(lambda: owner.basic_get(queue, no_ack=True), None))


@contextmanager
def frozen(node: RabbitNode) -> Iterator[None]:
    """Freeze the process group: the Erlang machine is a child of the script that started it."""
    process = own_process(node)
    os.killpg(process.pid, signal.SIGSTOP)
    script = psutil.Process(process.pid)
    for member in (script, *script.children(recursive=True)):
        if os.getpgid(member.pid) == process.pid:
            wait_until_stopped(member)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def close_connections(node: RabbitNode) -> None:
    """Close the connections to this vhost as an operator does: RabbitMQ tells the clients first."""
    tell_rabbitmq(
        node,
        '[ok = rabbit_networking:close_connection(Pid, "tidying up") || Pid <- rabbit_networking:connections(),'
        f' rabbit_reader:info(Pid, [vhost]) =:= [{{vhost, <<"{node.vhost}">>}}]]',
    )


def tell_rabbitmq(node: RabbitNode, expression: str) -> None:
    """Evaluate an Erlang expression. `erl_call` takes milliseconds; rabbitmqctl takes a second."""
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
        pytest.skip("RabbitMQ: the tests must not stop the server of AMQP_URL")
    return node.process
