"""SQL statements of the ledger, for any schema and any `search_path`.

A statement names our tables, sequences and functions as `ledger.NAME` and is made with `sql`, which works like
SQLAlchemy's `text`. When it is executed, `ledger.` becomes the schema of the installation (LEDGER_SCHEMA). So a
statement finds our tables through the caller's engine too, whatever the `search_path` of that engine is.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from sqlalchemy import TextClause

import settings

_PLACEHOLDER: Final = re.compile(r"\bledger\.(?=[a-z_])")


class LedgerText(TextClause):
    """A `text` that gets its schema when it is compiled. SQLAlchemy's cache keeps schemas apart."""

    inherit_cache = True

    @property
    def text(self) -> str:
        return qualified(self._template, settings.current().ledger_schema)

    @text.setter
    def text(self, template: str) -> None:
        self._template = template


def sql(statement: str) -> TextClause:
    """Return a statement of the ledger. Parameters are written as `:name`."""
    return LedgerText(statement)


@lru_cache(1024)
def qualified(statement: str, schema: str) -> str:
    """Replace `ledger.` by the schema. Its name was checked with the settings and needs no escaping."""
    return _PLACEHOLDER.sub(f'"{schema}".', statement)
