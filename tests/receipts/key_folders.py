"""Key folders for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import settings
from receipts.keys import KeyFolder, key_folder


@contextmanager
def key_folder_at(path: Path) -> Iterator[KeyFolder]:
    """Let this process and the programs that it starts use the keys in a folder."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("RECEIPT_KEYS", str(path))
        settings.current.cache_clear()
        yield key_folder()
    settings.current.cache_clear()
