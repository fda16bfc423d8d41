"""What the tables share: names of constraints, column types, the clock as a default, and common CHECKs.

An error names the constraint that was violated, so names of constraints follow one convention. The migration writes the
same names as literals.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from sqlalchemy import CheckConstraint, DateTime, Dialect, Interval, MetaData, Text, TypeDecorator, Uuid, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

from models.status import EventStatus, TaskStatus

PLACEHOLDER: Final = "ledger"  # stands for LEDGER_SCHEMA (`models/sql.py`)
NAMES: Final = {
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}

# For tables whose rows change several times in a short life: free space in each page for the next version of a row, and
# a vacuum that starts after a fixed number of dead rows, whatever the size of the table, and does not pause.
FREQUENT_UPDATES: Final[dict[str, int]] = {
    "fillfactor": 60,
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
}


class EnumText(TypeDecorator[StrEnum]):
    """A `StrEnum` stored as text with a CHECK (`status_check`); a migration cannot remove a value of a native enum."""

    impl = Text
    cache_ok = True

    def __init__(self, enum: type[StrEnum]) -> None:
        super().__init__()
        self.enum = enum

    def process_bind_param(self, value: StrEnum | str | None, _dialect: Dialect) -> str | None:
        return None if value is None else self.enum(value).value

    def process_result_value(self, value: Any, _dialect: Dialect) -> StrEnum | None:
        return None if value is None else self.enum(value)


class Base(DeclarativeBase):
    """The base of every table of the ledger."""

    metadata = MetaData(naming_convention=NAMES, schema=PLACEHOLDER)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        datetime: DateTime(timezone=True),
        timedelta: Interval(),
        uuid.UUID: Uuid(),
        list[uuid.UUID]: ARRAY(Uuid()),
        list[str]: ARRAY(Text()),
        TaskStatus: EnumText(TaskStatus),
        EventStatus: EnumText(EventStatus),
    }


# A default is evaluated once per row and is meant for rows written by hand. Our statements write `(SELECT
# ledger_now())`, which is evaluated once per statement.
Stamp = Annotated[datetime, mapped_column(server_default=text("ledger.ledger_now()"))]
Json = Annotated[Any, mapped_column(JSONB(none_as_null=True))]
JsonObject = Annotated[dict[str, Any], mapped_column(JSONB(none_as_null=True), server_default=text("'{}'"))]
Actor = Annotated[str, mapped_column(server_default=text("CURRENT_USER"))]


def status_check(column: str, enum: type[StrEnum]) -> CheckConstraint:
    """Return the CHECK that a column holds a value of the enum."""
    return CheckConstraint(f"{column} IN ({sql_literals(enum)})", name=column)


def lease_check() -> CheckConstraint:
    """Return the CHECK that a lease has both a token and an end, and a holder."""
    return CheckConstraint(
        "(lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL)", name="lease"
    )


def sql_literals(values: Iterable[str]) -> str:
    """Return our own constants as a list of SQL literals. Nothing is escaped."""
    return ", ".join(f"'{value}'" for value in values)
