"""pytest fixtures for users: `pytest_plugins = ["embedded.pytest_plugin"]` in your conftest.py.

    celeriac_stack      real servers, empty at the start of each test; `run_all()` runs all tasks in this process
    celeriac_db         a session in a transaction that is rolled back, for `tasks.testing`; it may `travel`
    crash_test          `tasks.testing.crash_test` on that stack: kills the worker of a task at every window

The servers are installed by pip and started once per run in a temporary folder, whatever your shell has set. The
fixtures are in this package because `tasks` must not import `embedded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.orm import Session

from embedded.stack_for_tests import StackForTests
from embedded.temporary_servers import TemporaryServers, environment, temporary_servers
from models import engine as engines
from outbox.after_commit_publisher import after_commit_publisher
from sinks.configuration import open_sinks
from tasks.testing import CrashReport
from tasks.testing import crash_test as run_crash_test


@pytest.fixture(scope="session")
def celeriac_servers() -> Iterator[TemporaryServers]:
    """Run servers for the whole session, without fsync because tests need not survive a power failure."""
    with temporary_servers(configuration={"fsync": "off"}) as servers:
        yield servers


@pytest.fixture
def celeriac_stack(celeriac_servers: TemporaryServers) -> Iterator[StackForTests]:
    """Point this process, and the processes it starts, at the empty servers of the tests."""
    stack = StackForTests(celeriac_servers)
    with environment(celeriac_servers.variables):
        stack.empty()
        yield stack
        after_commit_publisher().wait_until_idle()
        after_commit_publisher().close()
        if open_sinks.made:
            open_sinks.made.close()
        for one in engines._engines.values():
            one.dispose()
        engines._engines.clear()
    stack.superuser.dispose()


@pytest.fixture
def celeriac_db(celeriac_stack: StackForTests) -> Iterator[Session]:
    """Provide a session whose transaction is rolled back at the end. A commit in your code only ends a savepoint."""
    with celeriac_stack.superuser.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as session:
            yield session
        transaction.rollback()


@pytest.fixture
def crash_test(celeriac_stack: StackForTests) -> Callable[..., CrashReport]:
    """Provide `crash_test(type, payload, effects=…)`; see `tasks/testing/crashes.py`."""
    del celeriac_stack  # its servers are running, and empty
    return run_crash_test
