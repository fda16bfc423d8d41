"""Fixtures for the servers of a test run, which are started once, in a temporary folder."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import make_url

import settings
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.roles import PORTS, SERVER_ROLES
from embedded.shutdown import stop_programs
from embedded.stack import embedded_servers
from models import engine as engine_module
from outbox.after_commit_publisher import after_commit_publisher
from tally import counts
from tests.another_postgres import another_postgres
from tests.app import point_app_at
from tests.forgotten_counts import forget_counts
from tests.isolation import isolate
from tests.servers import Cluster, ServersOfTests, empty_tables, wait_until

pytest_plugins = [
    "tests.coverage_report",
    "tests.schedule",
    "tests.nodes.plugin",
    "tests.ledger_fixtures",
    "tests.stack_user",
]


def pytest_unconfigure() -> None:
    forget_counts()  # there is no ledger any more to append them to


# Files whose tests break their connections, and depend on which statements were prepared on them.
WITH_NEW_CONNECTIONS: Final = {"test_ledger_lost.py", "test_lost_commits.py"}


def pytest_configure() -> None:
    isolate()
    # Tests append the tally themselves, so that no thread executes statements while a test counts them.
    vars(counts)["APPEND_SECONDS"] = 3600.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the 800,000 objects of the collection out of every run of the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    """A home whose folder every account may enter: without user namespaces PostgreSQL runs under another account."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac tests "))  # with a space, as in the paths of some users
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    yield home
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def servers(home: Home) -> Iterator[ServersOfTests]:
    """PostgreSQL, the broker and the receipt Redis. PostgreSQL has no fsync: no test crashes the machine."""
    ports = home.ports(dict.fromkeys(PORTS, 0), wished={})
    programs, addresses = embedded_servers(home, ports, configuration={"fsync": "off", "max_connections": "100"})
    running = {program.role: program.start(home) for program in programs}
    for role in SERVER_ROLES:
        wait_until(running[role].is_ready, f"{role} is ready", seconds=20)
    home.write_stack(addresses)
    yield ServersOfTests(home, running, addresses, Cluster(Postgres(home, ports["postgres"])))
    stop_programs(home)
    for child in running.values():
        child.popen.wait(5)


@pytest.fixture(scope="session")
def postgres(servers: ServersOfTests) -> Cluster:
    return servers.cluster


@pytest.fixture(scope="session", params=["embedded", pytest.param("another", marks=pytest.mark.guarantee)])
def each_postgres(request: pytest.FixtureRequest, servers: ServersOfTests, home: Home) -> Iterator[Cluster]:
    """Run a test twice: on the embedded PostgreSQL and, if there is one, on another version."""
    if request.param == "embedded":
        yield servers.cluster
    else:
        with another_postgres(home) as cluster:
            yield cluster


@pytest.fixture
def empty_database(postgres: Cluster) -> Iterator[str]:
    """The address of a new database without our schema."""
    with postgres.temporary_database() as name:
        yield postgres.url(name)


@pytest.fixture
def database(postgres: Cluster) -> str:
    """The address of the migrated database, after emptying it."""
    empty_tables(postgres)
    forget_counts()  # of the test before
    return postgres.url(postgres.migrated)


@pytest.fixture
def stack(
    request: pytest.FixtureRequest, servers: ServersOfTests, database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServersOfTests]:
    """Point this process and its children at the servers of the tests, after emptying them.

    A connection to the migrated database stays open for the next test: opening it and preparing its statements takes
    longer than most tests.
    """
    servers.home.write_stack({**servers.addresses, "DATABASE_URL": database})
    servers.flush_redis()
    monkeypatch.setenv("CELERIAC_HOME", str(servers.home.path))
    settings.current.cache_clear()
    point_app_at(servers.addresses["BROKER_URL"])
    _keep_publisher(database)
    if database in engine_module._engines and request.path.name in WITH_NEW_CONNECTIONS:
        engine_module._engines.pop(database).dispose()
    yield servers
    for url, engine in list(engine_module._engines.items()):
        pool: Any = engine.pool
        is_as_new = pool.checkedout() == 0 and pool.checkedin() <= 1  # so that a test gets its connection again
        if url != database or not is_as_new or request.path.name in WITH_NEW_CONNECTIONS:
            engine_module._engines.pop(url).dispose()
    settings.current.cache_clear()


def _keep_publisher(database: str) -> None:
    """Keep the publishing thread of the test before if a new one would be the same.

    Settings look up an address once a second, and a test may change it, so `current` is not asked for it here.
    """
    made, current = after_commit_publisher.made, settings.current()
    if made is None or made._thread is None or not made._thread.is_alive() or made._is_closed:
        return
    is_as_new = not made.circuits._open and not made._left_to_relay
    is_connected_here = made._engine.url == make_url(database)
    if is_as_new and is_connected_here and made.settings.model_dump() == current.model_dump():
        made.settings = current
