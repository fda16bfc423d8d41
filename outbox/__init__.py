"""What must leave the database: a row in the caller's own transaction, published at least once.

outbox.add(session, "celery:ingest", payload)      with a session, published right after its commit
with outbox.begin(engine) as connection: …         the same for a plain connection
"""

from outbox.after_commit import begin
from outbox.new_events import NewEvent, add, add_many

__all__ = ["NewEvent", "add", "add_many", "begin"]
