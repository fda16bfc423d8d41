"""Write to a file sink, and see what is in its folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sinks.files import FileSink
from tasks.core.task import Task

GID = "celeriac:test:1:files"
NOBODY = 65534


def staged(sink: FileSink, gid: str = GID, **contents: Any) -> dict[str, Any]:
    """Stage files and return the handle. Two underscores in a name stand for a slash."""
    txn = sink.begin_transaction(gid)
    for name, content in contents.items():
        txn.folder.write(name.replace("__", "/"), content)
    handle = txn.handle
    sink.pre_commit(txn)
    return handle


def visible(root: Path) -> dict[str, str]:
    """Return the files in the folder, by name."""
    found = [path for path in root.rglob("*") if path.is_file() and ".celeriac" not in path.parts]
    return {str(path.relative_to(root)): path.read_text() for path in found}


def staging(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".celeriac").iterdir() if path.name != "id")


def writing(*names: str) -> Callable[[Task], None]:
    def write(task: Task) -> None:
        task.sink("files").run(lambda folder: [folder.write(name, name) for name in names])

    return write


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run without root's right to write everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
