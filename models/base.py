"""What the tables share: their names, the names of constraints, column types, and common CHECKs.

An error names the constraint that was violated, so names of constraints follow one convention. The migration writes the
same names as literals.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Final

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Identity, Interval, MetaData, Text, Uuid, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, declared_attr, mapped_column

PLACEHOLDER: Final = "ledger"  # stands for LEDGER_SCHEMA (`models/sql.py`)
NAMES: Final = {
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
}

# For tables whose rows change several times in a short life: free space in each page for the next version of a row, and
# a vacuum that starts after a fixed number of dead rows, whatever the size of the table, and does not pause.
FREQUENT_UPDATES: Final[dict[str, int]] = {
    "fillfactor": 60,
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
}


class Base(DeclarativeBase):
    """The base of every table of the ledger. A table has the name of its class: `TaskLease` is `task_lease`."""

    metadata = MetaData(naming_convention=NAMES, schema=PLACEHOLDER)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        datetime: DateTime(timezone=True),
        timedelta: Interval(),
        uuid.UUID: Uuid(),
        list[uuid.UUID]: ARRAY(Uuid()),
        list[str]: ARRAY(Text()),
    }

    @declared_attr.directive
    def __tablename__(cls) -> str:
        return re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()


# Columns that several tables have. A default is evaluated once per row and is meant for rows written by hand. Our
# statements write `(SELECT ledger_now())`, which is evaluated once per statement.
Number = Annotated[int, mapped_column(BigInteger, Identity(always=True), primary_key=True)]
RandomId = Annotated[uuid.UUID, mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))]
Stamp = Annotated[datetime, mapped_column(server_default=text("ledger.ledger_now()"))]
Count = Annotated[int, mapped_column(server_default=text("0"))]
Flag = Annotated[bool, mapped_column(server_default=text("false"))]
Json = Annotated[Any, mapped_column(JSONB(none_as_null=True))]
JsonObject = Annotated[dict[str, Any], mapped_column(JSONB(none_as_null=True), server_default=text("'{}'"))]
Actor = Annotated[str, mapped_column(server_default=text("CURRENT_USER"))]

LEASE: Final = "(lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL)"


def checks(**conditions: str) -> tuple[CheckConstraint, ...]:
    """Return a CHECK of each condition; `ck_`, the table and the given name are its name."""
    return tuple(CheckConstraint(condition, name=name) for name, condition in conditions.items())


def one_of(column: str, values: Iterable[str]) -> str:
    """Return the condition that a column has one of these values: our own constants, so nothing is escaped.

    An enum is stored as text with a CHECK, because a migration cannot remove a value of a native enum.
    """
    literals = ", ".join(f"'{value}'" for value in values)
    return f"{column} IN ({literals})"
