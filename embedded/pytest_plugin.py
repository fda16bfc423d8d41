"""pytest fixtures for users: `pytest_plugins = ["embedded.pytest_plugin"]` in your conftest.py.

    celeriac_stack      real servers, empty at the start of each test; `run_all()` works everything off in this process
    celeriac_db         a session in a transaction that is rolled back, for `tasks.testing`; it may `travel`

The servers come with pip and are started once for the run, in a temporary folder, whatever your shell has set. They
stand here and not in `tasks/`, which knows nothing of servers: imports point left only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from embedded.temporary_servers import Scratch, environment, scratch
from embedded.test_stack import StackOfTests
from models import engine as engines
from outbox.after_commit_publisher import submitter


@pytest.fixture(scope="session")
def celeriac_servers() -> Iterator[Scratch]:
    """Without fsync: no test of yours pulls the plug."""
    with scratch(configuration={"fsync": "off"}) as servers:
        yield servers


@pytest.fixture
def celeriac_stack(celeriac_servers: Scratch) -> Iterator[StackOfTests]:
    """This process, and what it starts, talk to the servers of the tests, which are empty."""
    stack = StackOfTests(celeriac_servers)
    with environment(celeriac_servers.variables):
        stack.empty()
        yield stack
        submitter().flush()
        submitter().close()
        for one in engines._engines.values():
            one.dispose()
        engines._engines.clear()
    stack.superuser.dispose()


@pytest.fixture
def celeriac_db(celeriac_stack: StackOfTests) -> Iterator[Session]:
    """Code that commits is welcome: it ends savepoints of the transaction that is rolled back."""
    with celeriac_stack.superuser.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as session:
            yield session
        transaction.rollback()
