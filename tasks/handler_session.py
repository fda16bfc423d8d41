"""The `db` of a transactional handler: a session in the transaction that will also say SUCCEEDED.

Its handler may do anything in it but end it: `commit`, `rollback` and `close` would tear the effect from the SUCCEEDED
that belongs to it, and are refused (P3). Savepoints (`begin_nested`) are the handler's own.
"""

from __future__ import annotations

import uuid
from typing import Any, NoReturn

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.errors import Misuse
from tasks.settle_statements import BEGIN_BATCH


class TransactionMisused(Misuse):
    """A handler does not end the transaction that it was given: its effect and SUCCEEDED commit together."""

    code = "transaction_misused"


class HandlerSession(Session):
    """Only its maker can end it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, expire_on_commit=False)

    def begin_batch(self, batch: uuid.UUID) -> None:
        """Marks the transaction, so that settling can tell whether it is still the same."""
        self.execute(BEGIN_BATCH, {"batch": str(batch)})

    def commit(self) -> NoReturn:
        raise TransactionMisused

    def rollback(self) -> NoReturn:
        raise TransactionMisused

    def close(self) -> NoReturn:
        raise TransactionMisused

    def invalidate(self) -> NoReturn:
        raise TransactionMisused

    def reset(self) -> NoReturn:
        raise TransactionMisused

    def commit_batch(self) -> None:
        super().commit()

    def end(self) -> None:
        """Roll back what was not committed, and give the connection back."""
        super().close()

    def __exit__(self, *_: Any) -> None:
        self.end()
