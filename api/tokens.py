"""Tokens of the API: who may do what. A token's name is the principal; its secret is shown once and never stored.

The ledger is authoritative: a token that was revoked, or whose time is over by the ledger's clock, is refused from that
moment on. Only the SHA-256 of a token is kept. It is looked up by that hash, so no comparison of ours can be timed; a
secret of 256 random bits needs no slow hash. `last_used_at` is right within a minute: not every request writes.

A name is used again only after its token was revoked or has expired; then it is the same principal with a new secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from sqlalchemy import Connection, Engine

from models.errors import CeleriacError, Misuse
from models.sql import sql

PREFIX: Final = "celeriac_"
_TOKEN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
# No colon: `principal:key` must be readable in one way only (P10).
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
USED_EVERY_SECONDS: Final = 60
LONGEST: Final = timedelta(days=36_500)


class Scope(StrEnum):
    """What a token may do. None follows from another, but that who reads all tasks reads its own."""

    TASKS_SUBMIT = "tasks:submit"
    TASKS_READ = "tasks:read"  # those that its principal has submitted
    TASKS_READ_ALL = "tasks:read-all"
    WORKFLOWS_SUBMIT = "workflows:submit"
    DOCUMENTS_WRITE = "documents:write"
    DOCUMENTS_READ = "documents:read"  # all of them: documents are shared


class Unauthenticated(CeleriacError):
    """A token is needed: Authorization: Bearer …"""

    code = "unauthenticated"
    http_status = 401


class Forbidden(CeleriacError):
    """The token does not allow this."""

    code = "forbidden"
    http_status = 403


class UnknownToken(Misuse):
    """There is no such token."""

    code = "unknown_token"
    http_status = 404


class TokenExists(Misuse):
    """There is a valid token of this name."""

    code = "token_exists"
    http_status = 409


@dataclass(frozen=True, slots=True)
class Token:
    """Whoever is asking."""

    name: str
    scopes: frozenset[str]

    def may(self, *any_of: Scope) -> bool:
        return not self.scopes.isdisjoint(any_of)


@dataclass(frozen=True, slots=True)
class ListedToken:
    name: str
    state: str  # active, expired, revoked
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


# create: a new name, or one whose token is revoked or expired.
CREATE: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    INSERT INTO ledger.api_token (name, token_sha256, scopes, created_at, expires_at)
    SELECT :name, :sha, CAST(:scopes AS text[]), at, at + CAST(:expires_in AS interval) FROM clock
    ON CONFLICT (name) DO UPDATE
        SET token_sha256 = excluded.token_sha256, scopes = excluded.scopes, created_at = excluded.created_at,
            expires_at = excluded.expires_at, revoked_at = NULL, last_used_at = NULL
        WHERE api_token.revoked_at IS NOT NULL OR api_token.expires_at <= excluded.created_at
    RETURNING expires_at
""")

LISTED: Final = sql("""
    SELECT name,
           CASE WHEN revoked_at IS NOT NULL THEN 'revoked'
                WHEN expires_at <= (SELECT ledger.ledger_now()) THEN 'expired' ELSE 'active' END,
           scopes, created_at, expires_at, revoked_at, last_used_at
    FROM ledger.api_token ORDER BY name
""")

REVOKE: Final = sql("""
    UPDATE ledger.api_token SET revoked_at = coalesce(revoked_at, (SELECT ledger.ledger_now())) WHERE name = :name
""")

LOOK_UP: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT name, scopes, token_sha256, revoked_at IS NOT NULL AS is_revoked,
           coalesce(expires_at <= at, false) AS is_expired,
           coalesce(last_used_at <= at - make_interval(secs => :every), true) AS is_stale
    FROM ledger.api_token CROSS JOIN clock WHERE token_sha256 = :sha
""")

# used: by whoever comes first; the others do not wait.
USED: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ledger.api_token CROSS JOIN clock
        WHERE token_sha256 = :sha AND coalesce(last_used_at <= at - make_interval(secs => :every), true)
        FOR NO KEY UPDATE OF api_token SKIP LOCKED)
    UPDATE ledger.api_token token SET last_used_at = at FROM held, clock WHERE token.id = held.id
""")


def create(
    connection: Connection, name: str, *, scopes: Collection[str], expires_in: timedelta | None = None
) -> tuple[str, datetime | None]:
    """The token, which nobody can be told again, and when it expires."""
    if not _NAME.fullmatch(name):
        raise Misuse(f"{name!r} is no name of a token: letters, digits and _ . @ - only, at most 100.")
    if unknown := sorted(set(scopes) - set(Scope)):
        raise Misuse(f"There is no scope {unknown[0]!r}. Known: {', '.join(Scope)}.")
    if not scopes:
        raise Misuse(f"A token without a scope opens nothing. Known: {', '.join(Scope)}.")
    if expires_in is not None and not timedelta() < expires_in <= LONGEST:
        raise Misuse("A token expires after a second at the earliest and a hundred years at the latest.")
    token = PREFIX + secrets.token_urlsafe(32)
    values = {"name": name, "sha": _sha(token), "scopes": sorted(set(scopes)), "expires_in": expires_in}
    made = connection.execute(CREATE, values).one_or_none()
    if made is None:
        raise TokenExists(f"There is a valid token {name!r} already: revoke it first, or choose another name.")
    return token, made.expires_at


def listed(connection: Connection) -> list[ListedToken]:
    """All of them, the revoked ones too."""
    return [ListedToken(*row) for row in connection.execute(LISTED)]


def revoke(connection: Connection, name: str) -> None:
    """From the commit on it is refused. Once more changes nothing."""
    if not connection.execute(REVOKE, {"name": name}).rowcount:
        raise UnknownToken(f"There is no token {name!r}.")


def look_up(engine: Engine, given: str) -> Token:
    """Raises Unauthenticated, which never repeats what was given."""
    if not _TOKEN.fullmatch(given):
        raise Unauthenticated("This is no token of ours.")
    sha = _sha(given)
    values = {"sha": sha, "every": USED_EVERY_SECONDS}
    with engine.connect() as connection:
        found = connection.execute(LOOK_UP, values).one_or_none()
        if found is None or not hmac.compare_digest(bytes(found.token_sha256), sha):
            raise Unauthenticated("There is no such token.")
        if found.is_revoked:
            raise Unauthenticated("The token was revoked.")
        if found.is_expired:
            raise Unauthenticated("The token has expired.")
        if found.is_stale:
            connection.execute(USED, values)
            connection.commit()
    return Token(found.name, frozenset(found.scopes))


def _sha(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
