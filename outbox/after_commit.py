"""Keep added events until their transaction has committed, then hand them to the publisher.

A session is watched through its own SQLAlchemy events. Events that were added inside a savepoint belong to it: they
move to the enclosing transaction when the savepoint is released, and are dropped when it is rolled back. They are
handed over at the end of the *root* transaction, after its commit. `after_commit` alone is not enough: it also fires
for savepoints, and before the root transaction has ended.

A plain connection fires no event after its COMMIT. Its events are handed over by `begin`, which commits by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, SessionTransaction

from models.engine import autocommit, is_ours
from outbox.after_commit_publisher import after_commit_publisher
from outbox.lease import ClaimedEvent, Db

_KEY: Final = "celeriac_outbox"
Pending = dict[SessionTransaction, list[ClaimedEvent]]


@contextmanager
def begin(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction like `engine.begin()`; its events are published right after the commit."""
    with engine.connect() as connection, _watching(connection), connection.begin():
        yield connection


@contextmanager
def begin_autocommit(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction of a single statement, which commits by itself."""
    if not is_ours(engine):
        with begin(engine) as connection:
            yield connection
    else:
        with autocommit(engine) as connection, _watching(connection):
            yield connection


@contextmanager
def _watching(connection: Connection) -> Iterator[None]:
    """Hand over the events that are added in the block, if it ends without an error: it has committed then."""
    added: list[ClaimedEvent] = []
    info = connection.info  # kept, because a connection that breaks gets another dict
    info[_KEY] = added
    try:
        yield
    finally:
        info.pop(_KEY, None)
    after_commit_publisher().hand_over(added)


def is_watched(db: Db) -> bool:
    """Return whether this module learns of the commit of the current transaction.

    It does not inside a savepoint of a plain connection, nor for a session bound to a connection that is in a
    transaction: the commit of such a session commits nothing.
    """
    if isinstance(db, Session):
        bind: Any = db.bind
        return not (isinstance(bind, Connection) and bind.in_transaction())
    return _KEY in db.info and not db.in_nested_transaction()


def publish_after_commit(db: Db, events: Sequence[ClaimedEvent]) -> None:
    """Publish events that were leased at insert when the transaction has committed. `db` must be watched."""
    if isinstance(db, Session):
        transaction = db.get_nested_transaction() or db.get_transaction()
        assert transaction is not None  # the INSERT has begun one
        db.info.setdefault(_KEY, {}).setdefault(transaction, []).extend(events)
    else:
        db.info[_KEY].extend(events)


@event.listens_for(Session, "after_commit")
def _note_commit(session: Session) -> None:
    if _KEY in session.info:
        session.info[_KEY, "committed"] = session.get_nested_transaction() or session.get_transaction()


@event.listens_for(Session, "after_transaction_end")
def _hand_over(session: Session, transaction: SessionTransaction) -> None:
    pending: Pending | None = session.info.get(_KEY)
    if pending is None:
        return
    events = pending.pop(transaction, [])
    committed = session.info.pop((_KEY, "committed"), None) is transaction
    if not pending and transaction.parent is None:
        del session.info[_KEY]
    if committed and events:
        if transaction.parent is None:
            after_commit_publisher().hand_over(events)
        else:
            session.info.setdefault(_KEY, {}).setdefault(transaction.parent, []).extend(events)
