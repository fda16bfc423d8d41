"""Children of a worker tell it their pids. It looks at them twice a second, and some do not live as long as that."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import Final

_PID: Final = struct.Struct("i")  # short enough to be written and read as a whole


class Births:
    """Made before the first fork."""

    def __init__(self) -> None:
        self._heard, self._told = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._told, False)

    def tell(self) -> None:
        """In a child."""
        with suppress(BlockingIOError):  # nobody listens
            os.write(self._told, _PID.pack(os.getpid()))

    def heard(self) -> set[int]:
        """In the parent: who was born since it last asked."""
        found = b""
        with suppress(BlockingIOError):
            while more := os.read(self._heard, 1024 * _PID.size):
                found += more
        return {pid for (pid,) in _PID.iter_unpack(found)}
