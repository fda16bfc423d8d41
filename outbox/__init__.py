"""The outbox: write an event in your own transaction; it is published at least once after the commit.

outbox.add(session, "celery:ingest", payload)      with a session
with outbox.begin(engine) as connection: …         with a plain connection
"""

from outbox.after_commit import begin
from outbox.new_events import NewEvent, add, add_many

__all__ = ["NewEvent", "add", "add_many", "begin"]
