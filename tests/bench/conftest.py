"""Fixtures for tests that run a whole benchmark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a temporary folder of this test alone, which a server that runs as another user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
