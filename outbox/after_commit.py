"""What happens to events between `add` and the moment their transaction has really committed.

A session is watched through its own events. Events of a savepoint belong to it: they move to the enclosing transaction
when it is released and vanish when it is rolled back. Only the end of the *root* transaction, after a commit, hands
them over: `after_commit` alone fires for savepoints too, and before the root is done. A plain connection says nothing
after its COMMIT (its event comes before), so its events are handed over by `begin`, which makes the commit itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, SessionTransaction

from models.engine import at_once, is_ours
from outbox.after_commit_publisher import submitter
from outbox.lease import ClaimedEvent, Db

_KEY: Final = "celeriac_outbox"
Pending = dict[SessionTransaction, list[ClaimedEvent]]


@contextmanager
def begin(engine: Engine) -> Iterator[Connection]:
    """`engine.begin()` whose events are published right after its commit."""
    with engine.connect() as connection, _handing_over(connection), connection.begin():
        yield connection


@contextmanager
def begin_at_once(engine: Engine) -> Iterator[Connection]:
    """`begin` for a single statement, which is then a transaction by itself."""
    if not is_ours(engine):
        with begin(engine) as connection:
            yield connection
    else:
        with at_once(engine) as connection, _handing_over(connection):
            yield connection


@contextmanager
def _handing_over(connection: Connection) -> Iterator[None]:
    """What is added in the block, if that ends well: with a commit."""
    added: list[ClaimedEvent] = []
    info = connection.info  # when the connection breaks, it has another
    info[_KEY] = added
    try:
        yield
    finally:
        info.pop(_KEY, None)
    submitter().hand_over(added)


def is_watched(db: Db) -> bool:
    """True if somebody will know of the commit of this transaction. Not inside a savepoint of a plain connection."""
    if isinstance(db, Session):
        return not _joins_a_foreign_transaction(db)
    return _KEY in db.info and not db.in_nested_transaction()


def publish_after_commit(db: Db, events: Sequence[ClaimedEvent]) -> None:
    if isinstance(db, Session):
        transaction = db.get_nested_transaction() or db.get_transaction()
        assert transaction is not None  # the INSERT has begun one
        pending: Pending = db.info.setdefault(_KEY, {})
        pending.setdefault(transaction, []).extend(events)
    else:
        db.info[_KEY].extend(events)


def _joins_a_foreign_transaction(session: Session) -> bool:
    """A session bound to a connection that is in a transaction: its own commit commits nothing."""
    bind: Any = session.bind
    return isinstance(bind, Connection) and bind.in_transaction()


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
            submitter().hand_over(events)
        else:
            session.info.setdefault(_KEY, {}).setdefault(transaction.parent, []).extend(events)
