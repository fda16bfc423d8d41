"""Whether the ledger can be worked with: it answers, and its schema is the one of this code."""

from __future__ import annotations

from models.engine import engine
from models.errors import SchemaMismatch
from models.schema import current_revision, head_revision, known_revisions


def require_ready(*, newer_is_ready: bool = False) -> None:
    """`newer_is_ready`: a schema that this code does not know was made by newer code, and yesterday's workers may go on
    with it while a deployment rolls."""
    with engine().connect() as connection:
        found = current_revision(connection)
    if newer_is_ready and found is not None and found not in known_revisions():
        return
    if found != head_revision():
        raise SchemaMismatch(
            f"The schema is at {found or 'nothing'}, this code needs {head_revision()}: run `manage.py migrate`."
        )
