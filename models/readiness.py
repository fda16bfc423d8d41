"""Whether the ledger can be worked with: it answers, and its schema is the one of this code."""

from __future__ import annotations

from models.engine import engine
from models.errors import SchemaMismatch
from models.schema import current_revision, head_revision


def require_ready() -> None:
    with engine().connect() as connection:
        found = current_revision(connection)
    if found != head_revision():
        raise SchemaMismatch(
            f"The schema is at {found or 'nothing'}, this code needs {head_revision()}: run `manage.py migrate`."
        )
