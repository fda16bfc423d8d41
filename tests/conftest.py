"""The servers of a test run: started once, in a temporary folder, never anybody else's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import settings
from embedded.home import Home
from embedded.part import Running
from embedded.postgres import Postgres
from embedded.roles import PORTS, SERVER_ROLES
from embedded.stack import embedded_servers
from embedded.stop_parts import stop_parts
from models import engine as engine_module
from tests.another_postgres import another_postgres
from tests.app import point_app_at
from tests.isolation import isolate
from tests.servers import Cluster, ServersOfTests, truncate_everything, wait_until

pytest_plugins = ["tests.coverage_report", "tests.nodes.plugin", "tests.ledger_fixtures"]


def pytest_configure() -> None:
    isolate()


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    """A home in a folder that `nobody` may walk to, for the fall-back of PostgreSQL without user namespaces."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac tests "))  # with a space: paths of users have them
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    yield home
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def servers(home: Home) -> Iterator[ServersOfTests]:
    """PostgreSQL, broker and receipt Redis; PostgreSQL without fsync, since no test of it pulls the plug."""
    ports = home.ports(dict.fromkeys(PORTS, 0), wished={})
    parts, addresses = embedded_servers(home, ports, configuration={"fsync": "off", "max_connections": "100"})
    running = {part.role: Running(home, part) for part in parts}
    for role in SERVER_ROLES:
        wait_until(running[role].is_ready, f"{role} is ready", seconds=20)
    home.write_stack(addresses)
    yield ServersOfTests(home, running, addresses, Cluster(Postgres(home, ports["postgres"])))
    stop_parts(home)
    for part in running.values():
        part.popen.wait(5)


@pytest.fixture(scope="session")
def postgres(servers: ServersOfTests) -> Cluster:
    return servers.cluster


@pytest.fixture(scope="session", params=["embedded", pytest.param("another", marks=pytest.mark.guarantee)])
def each_postgres(request: pytest.FixtureRequest, servers: ServersOfTests, home: Home) -> Iterator[Cluster]:
    """For tests that run twice: on the embedded PostgreSQL and on another version, where there is one."""
    if request.param == "embedded":
        yield servers.cluster
    else:
        with another_postgres(home) as cluster:
            yield cluster


@pytest.fixture
def empty_database(postgres: Cluster) -> Iterator[str]:
    """The address of a database of its own, without a schema."""
    with postgres.temporary_database() as name:
        yield postgres.url(name)


@pytest.fixture
def database(postgres: Cluster) -> str:
    """The address of the migrated database, emptied."""
    truncate_everything(postgres)
    return postgres.url(postgres.migrated)


@pytest.fixture
def stack(servers: ServersOfTests, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServersOfTests]:
    """This process, and what it starts, talk to the servers of the tests, which are empty."""
    servers.home.write_stack({**servers.addresses, "DATABASE_URL": database})
    servers.flush_redis()
    monkeypatch.setenv("CELERIAC_HOME", str(servers.home.path))
    settings.current.cache_clear()
    point_app_at(servers.addresses["BROKER_URL"])
    yield servers
    for engine in engine_module._engines.values():
        engine.dispose()
    engine_module._engines.clear()
    settings.current.cache_clear()
