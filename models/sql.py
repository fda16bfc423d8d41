"""SQL statements of the ledger, for any schema and any `search_path`.

A statement names our tables, sequences and functions as `ledger.NAME` and is made with `sql`, which works like
SQLAlchemy's `text`. When it is executed, `ledger.` becomes the schema of the installation (LEDGER_SCHEMA). So a
statement finds our tables through the caller's engine too, whatever the `search_path` of that engine is.
"""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy import TextClause

import settings

_PLACEHOLDER: Final = re.compile(r"\bledger\.(?=[a-z_])")


class LedgerText(TextClause):
    """A `text` that gets its schema when it is compiled. SQLAlchemy's cache keeps schemas apart."""

    inherit_cache = True

    def __init__(self, statement: str) -> None:
        self._by_schema: dict[str, str] = {}
        super().__init__(statement)

    @property
    def text(self) -> str:
        schema = settings.current().ledger_schema
        if schema not in self._by_schema:
            self._by_schema[schema] = qualified(self._template, schema)
        return self._by_schema[schema]

    @text.setter
    def text(self, template: str) -> None:
        self._template = template


def sql(statement: str) -> TextClause:
    """Return a statement of the ledger. Parameters are written as `:name`."""
    return LedgerText(statement)


def qualified(statement: str, schema: str) -> str:
    """Replace `ledger.` by the schema. Its name was checked with the settings and needs no escaping."""
    return _PLACEHOLDER.sub(f'"{schema}".', statement)
