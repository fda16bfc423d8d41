"""The tally: what became of tasks and events, by minute, queue, type and result (`tally/`).

`task_tally` is appended by those who settle tasks, and emptied every few seconds into `tally_period`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import BigInteger, Float, Integer, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from models.base import FREQUENT_UPDATES, Base, Number, checks, one_of

SPANS: Final = ("minute", "hour", "day", "ever")


class TaskTally(Base):
    """What one statement settled, or what one process counted in a second. Rows live for a few seconds."""

    __table_args__: tuple[object, ...] = ({"postgresql_with": {**FREQUENT_UPDATES, "fillfactor": 100}},)

    id: Mapped[Number]
    minute: Mapped[datetime]
    subject: Mapped[str]
    queue: Mapped[str]
    type: Mapped[str]
    result: Mapped[str]
    count: Mapped[int]
    run_seconds: Mapped[float] = mapped_column(Float(53))
    run: Mapped[list[int]] = mapped_column(ARRAY(Integer))  # a histogram (`tally/histograms.py`)
    wait_seconds: Mapped[float] = mapped_column(Float(53))
    wait: Mapped[list[int]] = mapped_column(ARRAY(Integer))
    kind: Mapped[int] = mapped_column(BigInteger)  # what it counts, as one number (`tally/append.py`)


class TallyPeriod(Base):
    """The sum of a minute, an hour or a day, which begins at `start` (UTC); or of all time."""

    __table_args__: tuple[object, ...] = (
        *checks(span=one_of("span", SPANS), ever="(span = 'ever') = (start = '-infinity')"),
        {"postgresql_with": FREQUENT_UPDATES},
    )

    span: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[datetime] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    queue: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str] = mapped_column(primary_key=True)
    result: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    run_seconds: Mapped[float] = mapped_column(Float(53))
    run: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default=text("'{}'"))
    wait_seconds: Mapped[float] = mapped_column(Float(53))
    wait: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default=text("'{}'"))
