"""Import every module that defines a table, so that `Base.metadata` is complete."""

from models import (  # noqa: F401
    api_tokens,
    bulk_actions,
    chats,
    clock,
    console,
    dead_mutes,
    documents,
    limits,
    outbox,
    queues,
    receipts,
    schedules,
    sinks,
    streams,
    tally,
    task_types,
    tasks,
    ticks,
)
from models.base import Base

__all__ = ["Base"]
