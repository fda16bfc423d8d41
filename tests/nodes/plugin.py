"""The one RabbitMQ of a test run, for tests of every folder: a fixture that two conftest files import would be two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.containers import RabbitNode
from tests.nodes.shared import SharedRabbit


@pytest.fixture(scope="session", autouse=True)
def shared_rabbit(request: pytest.FixtureRequest) -> Iterator[SharedRabbit]:
    """Boots while other tests run, if one of this run will ask for it."""
    rabbit = SharedRabbit()
    if any(_needs_it(item) for item in request.session.items):
        rabbit.launch()
    yield rabbit
    rabbit.end()


@pytest.fixture
def rabbitmq_vhost(shared_rabbit: SharedRabbit) -> RabbitNode:
    """Where no worker listens. Tests share it: each makes its queues anew."""
    return shared_rabbit.vhost("without workers")


def _needs_it(item: pytest.Item) -> bool:
    """A parameter shows in the name; a fixture that is asked for shows among the item's."""
    return "rabbitmq" in item.name or "rabbitmq_vhost" in getattr(item, "fixturenames", ())
