"""Import every module that defines a table, so that `Base.metadata` is complete."""

from models import api_tokens, chats, clock, documents, outbox, queues, sinks, streams, tasks, ticks  # noqa: F401
from models.base import Base

__all__ = ["Base"]
