"""Sessions of browsers, and links that log in once.

    session    a random secret in a cookie, valid for SESSION_HOURS, or until it is logged out or its token ends
    link       a random code in an address, valid for LINK_MINUTES and for one login

The ledger is authoritative and stores only hashes. A session may do what its token may do at that moment. It names the
token by its hash, so it ends at once when the token is revoked or expires, and it does not come back if a token of the
same name is created. Expired rows are deleted when new ones are stored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, Engine

from api import tokens
from api.tokens import Scope, Token, Unauthenticated
from models.driver_values import array
from models.sql import sql

SESSION_HOURS: Final = 12
LINK_MINUTES: Final = 10
# The token of links, unless they name another. It is created with the first link, and its secret is not kept.
LINK_TOKEN: Final = "console"  # noqa: S105 - the name of a token
LINK_SCOPES: Final = (
    Scope.OPERATE,
    Scope.TASKS_SUBMIT,
    Scope.DOCUMENTS_READ,
    Scope.DOCUMENTS_WRITE,
    Scope.WORKFLOWS_SUBMIT,
)
_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 random bytes

# begin: → session of a valid token. Returns nothing if the token is not valid.
BEGIN: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    expired AS (DELETE FROM ledger.console_session WHERE expires_at <= (SELECT at FROM clock))
    INSERT INTO ledger.console_session (session_sha256, token_sha256, created_at, expires_at)
    SELECT :session, token_sha256, at, at + make_interval(hours => :hours)
    FROM ledger.api_token CROSS JOIN clock
    WHERE token_sha256 = :token AND revoked_at IS NULL AND coalesce(expires_at > at, true)
    RETURNING session_sha256
""")
END: Final = sql("DELETE FROM ledger.console_session WHERE session_sha256 = :session")
# find: the valid ones of these sessions, with their tokens.
FIND: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT session.session_sha256, token.name, token.scopes, token.types
    FROM ledger.console_session session JOIN ledger.api_token token ON token.token_sha256 = session.token_sha256
    CROSS JOIN clock
    WHERE session.session_sha256 = ANY(CAST(:sessions AS bytea[])) AND session.expires_at > at
      AND token.revoked_at IS NULL AND coalesce(token.expires_at > at, true)
""")
STORE_LINK: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    expired AS (DELETE FROM ledger.console_link WHERE expires_at <= (SELECT at FROM clock))
    INSERT INTO ledger.console_link (code_sha256, token_sha256, created_at, expires_at)
    SELECT :code, :token, at, at + make_interval(mins => :minutes) FROM clock
""")
# use_link: valid → deleted.
USE_LINK: Final = sql("""
    DELETE FROM ledger.console_link WHERE code_sha256 = :code AND expires_at > (SELECT ledger.ledger_now())
    RETURNING token_sha256
""")


class UnknownLink(Unauthenticated):
    """The link is not valid: it was used, or it is older than ten minutes.

    A link logs in once, within ten minutes after `manage.py console link` or `manage.py up` printed it.
    """

    code = "unknown_link"
    remedy = "Run `manage.py console link` for a new link."


def log_in(engine: Engine, secret: str) -> str:
    """Begin a session for the token with this secret, and return the session's own secret. Raises Unauthenticated."""
    tokens.authenticate(engine, secret)
    with engine.begin() as connection:
        return _begin(connection, _sha(secret))


def log_in_by_link(engine: Engine, code: str) -> str:
    """Use a link up, and begin a session for its token. Raises UnknownLink, or Unauthenticated."""
    with engine.begin() as connection:
        found = connection.execute(USE_LINK, {"code": _sha(code)}).one_or_none()
        if found is None:
            raise UnknownLink
        return _begin(connection, found.token_sha256)


def log_out(connection: Connection, session: str) -> None:
    connection.execute(END, {"session": _sha(session)})


def find_session(connection: Connection, session: str) -> Token | None:
    """Return the token of a session; None if the session is unknown or has ended."""
    if not _SECRET.fullmatch(session):
        return None
    return find_sessions(connection, [session]).get(session)


def find_sessions(connection: Connection, sessions: Collection[str]) -> dict[str, Token]:
    """Return the tokens of those sessions that have not ended."""
    by_sha = {_sha(each): each for each in sessions}
    hexadecimal = array(f"\\x{sha.hex()}" for sha in by_sha)
    return {
        by_sha[bytes(sha)]: Token(name, frozenset(scopes), tuple(types))
        for sha, name, scopes, types in connection.execute(FIND, {"sessions": hexadecimal})
    }


def create_link(connection: Connection, token_name: str | None = None) -> str:
    """Store a link for a token, by default for LINK_TOKEN, and return its code. Raises UnknownToken."""
    if token_name is None:
        token = tokens.find_or_create(connection, LINK_TOKEN, scopes=LINK_SCOPES)
    else:
        token = tokens.find_valid(connection, token_name)
    code = secrets.token_urlsafe(32)
    connection.execute(STORE_LINK, {"code": _sha(code), "token": token, "minutes": LINK_MINUTES})
    return code


def form_token(session: str) -> str:
    """Return what the forms of a session send along, which no other site can know (CSRF)."""
    return hmac.new(session.encode(), b"celeriac console form", hashlib.sha256).hexdigest()


def _begin(connection: Connection, token_sha: bytes) -> str:
    session = secrets.token_urlsafe(32)
    values = {"session": _sha(session), "token": token_sha, "hours": SESSION_HOURS}
    if connection.execute(BEGIN, values).one_or_none() is None:
        raise Unauthenticated("The token was revoked or has expired.")
    return session


def _sha(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
