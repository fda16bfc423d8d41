"""pytest-celery's fixtures with processes of this machine in them, and one worker per broker that the tests share.

Beyond the nodes two fixtures are replaced: there is no result backend, since results live in the ledger; and the app
that talks to a worker has the project's settings, since a ping under another key prefix reaches nobody and still counts
as answered by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu.pools
import pytest

import failpoint
from outbox.after_commit_publisher import submitter
from tasks.core import batch_size
from tests.nodes.containers import LocalTestWorker, RabbitNode, RedisNode, WorkerNode
from tests.nodes.shared import SharedNodes, SharedRabbit
from tests.servers import ServersOfTests
from tests.tasks.celery_settings import celery_settings
from tests.tasks.deliveries import BatchClock, clean_sink
from tests.tasks.held import Held

RABBITMQ = pytest.param("celery_rabbitmq_broker", marks=pytest.mark.guarantee)


@pytest.fixture(scope="session")
def nodes(
    servers: ServersOfTests, shared_rabbit: SharedRabbit, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedNodes]:
    migrated = servers.cluster.url(servers.cluster.migrated)
    servers.home.write_stack({**servers.addresses, "DATABASE_URL": migrated})  # as `stack` does for each test
    nodes = SharedNodes(tmp_path_factory.mktemp("nodes"), ledger=servers.home, rabbit=shared_rabbit)
    yield nodes
    nodes.end()


class QuickUntilSeen(dict[str, float]):
    """As in a worker that has run some of each type: what is new to it, it would try alone at first."""

    def __contains__(self, _type: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_seconds", QuickUntilSeen())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> BatchClock:
    clock = BatchClock()
    monkeypatch.setattr("tasks.execution.batch.time", clock)
    return clock


@pytest.fixture(autouse=True)
def _submitter_has_finished() -> Iterator[None]:
    """What a test has handed over is published before the next one empties the tables; no test leaves a connection."""
    yield
    if left := submitter.made:
        left.flush()
        left._engine.dispose()


@pytest.fixture
def ledger(stack: ServersOfTests) -> Iterator[ServersOfTests]:
    """The stack with the handlers of tests and their sink, for tests that need no worker."""
    with clean_sink():
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
    kombu.pools.reset()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """A message that stays in a worker's hand until the test lets go."""
    held = Held(tmp_path / "held")
    yield held
    held.release()
