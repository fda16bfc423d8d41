"""Fixtures for the ledger, and pytest-celery's fixtures with local processes instead of containers.

The tests share one worker per broker. Two more fixtures of pytest-celery are replaced: there is no result backend,
because results are in the ledger; and the app that talks to a worker has the project's settings, because a ping under
another key prefix reaches no worker and would still count as answered by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import failpoint
from outbox.after_commit_publisher import after_commit_publisher
from tasks.core import batch_size
from tests.app import close_broker_connections
from tests.nodes.containers import LocalTestWorker, RabbitNode, RedisNode, WorkerNode
from tests.nodes.shared import SharedNodes, SharedRabbit
from tests.servers import ServersOfTests
from tests.tasks.celery_settings import celery_settings
from tests.tasks.deliveries import BatchClock, clean_sink
from tests.tasks.held import Held
from tests.tasks.registrations import no_worker_processes

RABBITMQ = pytest.param("celery_rabbitmq_broker", marks=pytest.mark.guarantee)


@pytest.fixture(scope="session")
def nodes(
    servers: ServersOfTests, shared_rabbit: SharedRabbit, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedNodes]:
    migrated = servers.cluster.url(servers.cluster.migrated)
    servers.home.write_stack({**servers.addresses, "DATABASE_URL": migrated})  # `stack` does the same for each test
    nodes = SharedNodes(tmp_path_factory.mktemp("nodes"), ledger=servers.home, rabbit=shared_rabbit)
    yield nodes
    nodes.end()


class EveryType(dict[str, float]):
    """Durations of a worker that has run every type of task."""

    def __contains__(self, _type: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins like a new worker: it has run no type of task, so the first task of each type runs alone."""
    monkeypatch.setattr(batch_size, "_seconds", {})


@pytest.fixture
def known_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about whole batches: a worker that has run every type, so that no task runs alone first."""
    monkeypatch.setattr(batch_size, "_seconds", EveryType())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> BatchClock:
    """A clock for batches that moves only when a handler says so."""
    clock = BatchClock()
    for module in ("claim", "call_handler"):
        monkeypatch.setattr(f"tasks.execution.{module}.time", clock)
    return clock


@pytest.fixture(autouse=True)
def _wakeups_are_published() -> Iterator[None]:
    """Wait until the wake-ups of a test are published, before the next test empties the tables."""
    yield
    if left := after_commit_publisher.made:
        left.wait_until_idle()


@pytest.fixture
def ledger(stack: ServersOfTests) -> Iterator[ServersOfTests]:
    """The stack with the handlers of the tests and an empty sink, for tests without a worker process."""
    with clean_sink(), no_worker_processes():
        yield stack
    failpoint.arm()


@pytest.fixture
def default_redis_broker(nodes: SharedNodes) -> RedisNode:
    return nodes.redis()


@pytest.fixture
def default_rabbitmq_broker(nodes: SharedNodes) -> RabbitNode:
    return nodes.rabbitmq()


@pytest.fixture(params=["celery_redis_broker", RABBITMQ])
def celery_broker(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def celery_backend_cluster() -> None:
    return None


@pytest.fixture
def default_worker_cls() -> type[LocalTestWorker]:
    return LocalTestWorker


@pytest.fixture
def default_worker_container(nodes: SharedNodes, stack: ServersOfTests, celery_broker: Any) -> WorkerNode:
    return nodes.worker(celery_broker.container)


@pytest.fixture
def celery_setup_config(celery_broker: Any) -> Iterator[dict[str, Any]]:
    yield celery_settings(celery_broker.container.url)
    close_broker_connections()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """Makes a worker hold a message until the test releases it."""
    held = Held(tmp_path / "held")
    yield held
    held.release()
