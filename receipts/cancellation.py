"""Cancel tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

AGAIN_SECONDS: Final = 0.1


async def cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended. Do not cancel a task this way that calls this itself.

    Python 3.11 loses a cancellation that comes just when what `asyncio.wait_for` waits for is done, and redis-py uses
    `wait_for` in every command. So it is repeated.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_SECONDS)
