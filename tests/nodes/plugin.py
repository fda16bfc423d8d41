"""Fixtures for the RabbitMQ of the test run. A plugin, since a fixture imported by two conftest files exists twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.nodes.containers import RabbitNode
from tests.nodes.shared import SharedRabbit
from tests.schedule import RABBITMQ, unit_of

RABBIT: Final = pytest.StashKey[SharedRabbit]()


@pytest.fixture(scope="session", autouse=True)
def shared_rabbit(request: pytest.FixtureRequest) -> Iterator[SharedRabbit]:
    """Start RabbitMQ early, while other tests run, if a test of this process needs it."""
    rabbit = SharedRabbit()
    request.config.stash[RABBIT] = rabbit
    yield rabbit
    rabbit.end()


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start it with the first of the files that need it, without waiting. See `tests/schedule.py`."""
    if unit_of(item.nodeid) == RABBITMQ and any(map(_needs_it, item.session.items)):
        item.config.stash[RABBIT].launch()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if a file needs RabbitMQ that would start it in another process."""
    unknown = {item.path.name for item in session.items if _needs_it(item) and unit_of(item.nodeid) != RABBITMQ}
    assert not unknown, f"name these files in WITH_RABBITMQ of tests/schedule.py: {unknown}"


@pytest.fixture
def rabbitmq_vhost(shared_rabbit: SharedRabbit) -> RabbitNode:
    """Provide a virtual host without workers. Tests share it, so each must delete and declare its queues."""
    return shared_rabbit.vhost("without workers")


def _needs_it(item: pytest.Item) -> bool:
    """Return whether a test has RabbitMQ among its parameters or its fixtures."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    is_parameter = any(isinstance(one, str) and "rabbitmq" in one for one in parameters)
    return is_parameter or "rabbitmq_vhost" in getattr(item, "fixturenames", ())
