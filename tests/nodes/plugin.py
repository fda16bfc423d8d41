"""Fixtures for the RabbitMQ of the test run. A plugin, since a fixture imported by two conftest files exists twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.containers import RabbitNode
from tests.nodes.shared import SharedRabbit


@pytest.fixture(scope="session", autouse=True)
def shared_rabbit(request: pytest.FixtureRequest) -> Iterator[SharedRabbit]:
    """Start RabbitMQ early, while other tests run, if a test of this run needs it."""
    rabbit = SharedRabbit()
    if any(_needs_it(item) for item in request.session.items):
        rabbit.launch()
    yield rabbit
    rabbit.end()


@pytest.fixture
def rabbitmq_vhost(shared_rabbit: SharedRabbit) -> RabbitNode:
    """Provide a virtual host without workers. Tests share it, so each must delete and declare its queues."""
    return shared_rabbit.vhost("without workers")


def _needs_it(item: pytest.Item) -> bool:
    """Return whether a test has RabbitMQ among its parameters, which show in its name, or among its fixtures."""
    return "rabbitmq" in item.name or "rabbitmq_vhost" in getattr(item, "fixturenames", ())
