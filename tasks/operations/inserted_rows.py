"""How many tasks and receipts were ever inserted, as PostgreSQL counts rows for itself.

The tally has no row for each submit, because that would cost every submit a statement. PostgreSQL's own counters cost
nothing. They are about a second behind, count rows of transactions that were rolled back, and begin at zero after a
crash of the server: good enough for the difference between two moments, and for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from models.sql import sql

INSERTED: Final = sql("""
    SELECT pg_stat_get_tuples_inserted('ledger.ingest_task'::regclass),
           pg_stat_get_tuples_inserted('ledger.receipt'::regclass)
""")


@dataclass(frozen=True, slots=True)
class Inserted:
    tasks: int
    receipts: int


def read_inserted(connection: Connection) -> Inserted:
    return Inserted(*connection.execute(INSERTED).one())
