"""Limits: how many tasks of a type, or of one value of `limit_by`, may run or start (docs/protocol.md, Limits)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import FREQUENT_UPDATES, Base


class TaskLimit(Base):
    """The lock under which tasks with one limit are admitted, and the tokens of its rate.

    A limit without a row has all its tokens. How many tasks run is counted in `ingest_task`, so it cannot be wrong.
    """

    __table_args__ = ({"postgresql_with": FREQUENT_UPDATES},)

    type: Mapped[str] = mapped_column(primary_key=True)
    limit_key: Mapped[str] = mapped_column(Text(collation="C"), primary_key=True)  # empty: without a value
    tokens: Mapped[float]  # how many tasks may start at `refilled_at`
    refilled_at: Mapped[datetime]
