"""Run a block that starts servers and programs, and leave none of them behind, even if a signal ends it.

All temporary files of the block are in one folder, which is also its TMPDIR. Every program inherits that variable, so
those that are left at the end are found and killed, also one that the signal caught between its start and its first
line. The block's own `finally` clauses run first and stop the programs in order; a second signal cuts them short.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from child_process import OwnProcess
from embedded.signals import NUMBERS
from embedded.temporary_servers import environment

FOLDER: Final = "TMPDIR"
STOPPING: Final = b"Interrupted: stopping the temporary servers ...\n"


@contextmanager
def leaving_nothing_behind() -> Iterator[Path]:
    """Yield the folder for temporary files. After a signal, exit with 128 + its number, as shells report it."""
    folder = Path(tempfile.gettempdir()) / f"celeriac-scratch-{uuid.uuid4().hex[:12]}"
    received: list[int] = []
    is_over = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not is_over:
            received.append(number)
            os.write(2, STOPPING)  # print() could fail: the signal may have interrupted another print()
            raise KeyboardInterrupt

    # A signal that was ignored before (`nohup`) stays ignored.
    handled = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        folder.mkdir()
        folder.chmod(0o755)  # PostgreSQL may run as another user
        with _temporary_files_in(folder):
            yield folder
    except BaseException:
        if received:  # what was interrupted may have raised an error of its own
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        is_over = True
        _kill_programs(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        with environment({FOLDER: str(folder)}):
            yield
    finally:
        tempfile.tempdir = before


def _kill_programs(folder: Path) -> None:
    """Kill all programs of the block, and look again for those that they started meanwhile."""
    while found := OwnProcess.with_variable(FOLDER, str(folder)):
        for process in found:
            process.kill()
        for process in found:
            process.wait(5)
