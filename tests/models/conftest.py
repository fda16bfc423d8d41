"""The ledger's tests run on the embedded PostgreSQL and on another version, where there is one."""

from __future__ import annotations

import pytest

from tests.servers import Cluster


@pytest.fixture(scope="session")
def postgres(each_postgres: Cluster) -> Cluster:
    return each_postgres
