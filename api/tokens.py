"""API tokens: who may do what. A token's name is the principal; its secret is shown once and never stored.

The ledger is authoritative: a token that was revoked, or that has expired by the ledger's clock, is rejected from that
moment on. Only the SHA-256 of a token is stored. It is looked up by that hash, so the comparison cannot be timed; a
secret of 256 random bits needs no slow hash. `last_used_at` is exact to a minute, so that not every request writes.

A name can be used again after its token was revoked or has expired. The new token is the same principal.

A token may submit a type of task if

    the type has a scope of its own (`SCOPE_OF_TYPE`)    the token has that scope
    any other type                                       one of the token's patterns (`--type 'invoice.*'`) matches the
                                                         type, or the token has no patterns
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from sqlalchemy import Connection, Engine

from models.errors import CeleriacError, Misuse
from models.sql import sql

PREFIX: Final = "celeriac_"
_TOKEN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
# No colon, because `principal:key` must have one reading only.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_PATTERN: Final = re.compile(r"[A-Za-z0-9_.:*?!\[\]-]{1,100}")  # the characters of a type, and * ? [ ] !
RECORD_USE_SECONDS: Final = 60
LONGEST: Final = timedelta(days=36_500)


class Scope(StrEnum):
    """What a token may do. No scope includes another, but `tasks:read-all` and `operate` include `tasks:read`."""

    TASKS_SUBMIT = "tasks:submit"
    TASKS_READ = "tasks:read"  # the tasks of its own principal
    TASKS_READ_ALL = "tasks:read-all"
    WORKFLOWS_SUBMIT = "workflows:submit"
    DOCUMENTS_WRITE = "documents:write"
    DOCUMENTS_READ = "documents:read"  # the documents of its own principal, and the shared ones
    OPERATE = (
        "operate"  # everything under /internal, all tasks, and details of errors: tracebacks, paths, SQL, addresses
    )
    HTTP_REQUEST = "http:request"  # tasks that send a request to a destination of OUTBOX_DESTINATIONS
    CHAT = "chat"  # /ws/chat, as the user with the name of the token


# Built-in types that reach more than the ledger. `tasks:submit` alone does not cover them, on any route.
SCOPE_OF_TYPE: Final = {
    "workflow.execute": Scope.WORKFLOWS_SUBMIT,
    "document.ingest": Scope.DOCUMENTS_WRITE,
    "http.request": Scope.HTTP_REQUEST,
}


class Unauthenticated(CeleriacError):
    """A token is required: send the header `Authorization: Bearer TOKEN`.

    The request has no token, more than one, or one that is unknown, revoked or expired.
    """

    code = "unauthenticated"
    remedy = "Create a token with `manage.py token create NAME --scope …` and send it in the Authorization header."
    http_status = 401


class Forbidden(CeleriacError):
    """The token does not allow this.

    The token lacks the scope that the route or the type of the task needs, or its list of types does not have the type.
    """

    code = "forbidden"
    remedy = "Use a token with the scope or type that the message names; `manage.py token list` shows both."
    http_status = 403


class UnknownToken(Misuse):
    """There is no such token.

    No token was ever created under this name, or it was revoked or has expired.
    """

    code = "unknown_token"
    remedy = "Look up the name with `manage.py token list`."
    http_status = 404


class TokenExists(Misuse):
    """A valid token with this name exists.

    A name belongs to one valid token at a time.
    """

    code = "token_exists"
    remedy = "Revoke the token with `manage.py token revoke NAME` first, or choose another name."
    http_status = 409


@dataclass(frozen=True, slots=True)
class Token:
    """The caller of a request."""

    name: str
    scopes: frozenset[str]
    types: tuple[str, ...] = ()  # patterns of the types that `tasks:submit` covers; empty: any

    def has_scope(self, *any_of: Scope) -> bool:
        """Return True if it has one of the scopes."""
        return not self.scopes.isdisjoint(any_of)

    def require_type(self, type: str) -> None:
        """Raise Forbidden unless the token may submit tasks of this type."""
        scope = SCOPE_OF_TYPE.get(type)
        if scope is not None:
            if not self.has_scope(scope):
                raise Forbidden(f"The token {self.name} lacks the scope {scope}, which the type {type} needs.")
        elif self.types and not any(fnmatchcase(type, pattern) for pattern in self.types):
            allowed = ", ".join(self.types)
            raise Forbidden(f"The token {self.name} may submit only these types: {allowed}.")


@dataclass(frozen=True, slots=True)
class ListedToken:
    name: str
    state: str  # active, expired, revoked
    scopes: list[str]
    types: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


# create: insert a token, or replace one that is revoked or expired.
CREATE: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    INSERT INTO ledger.api_token (name, token_sha256, scopes, types, created_at, expires_at)
    SELECT :name, :sha, CAST(:scopes AS text[]), CAST(:types AS text[]), at, at + CAST(:expires_in AS interval)
    FROM clock
    ON CONFLICT (name) DO UPDATE
        SET token_sha256 = excluded.token_sha256, scopes = excluded.scopes, types = excluded.types,
            created_at = excluded.created_at, expires_at = excluded.expires_at, revoked_at = NULL, last_used_at = NULL
        WHERE api_token.revoked_at IS NOT NULL OR api_token.expires_at <= excluded.created_at
    RETURNING expires_at
""")

LIST: Final = sql("""
    SELECT name,
           CASE WHEN revoked_at IS NOT NULL THEN 'revoked'
                WHEN expires_at <= (SELECT ledger.ledger_now()) THEN 'expired' ELSE 'active' END,
           scopes, types, created_at, expires_at, revoked_at, last_used_at
    FROM ledger.api_token ORDER BY name
""")

REVOKE: Final = sql("""
    UPDATE ledger.api_token SET revoked_at = coalesce(revoked_at, (SELECT ledger.ledger_now())) WHERE name = :name
""")

LOOK_UP: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT name, scopes, types, token_sha256, revoked_at IS NOT NULL AS is_revoked,
           coalesce(expires_at <= at, false) AS is_expired,
           coalesce(last_used_at <= at - make_interval(secs => :every), true) AS is_stale
    FROM ledger.api_token CROSS JOIN clock WHERE token_sha256 = :sha
""")

FIND_VALID: Final = sql("""
    SELECT token_sha256 FROM ledger.api_token
    WHERE name = :name AND revoked_at IS NULL AND coalesce(expires_at > (SELECT ledger.ledger_now()), true)
""")

# record_use: skipped if another request is just recording it.
RECORD_USE: Final = sql("""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ledger.api_token CROSS JOIN clock
        WHERE token_sha256 = :sha AND coalesce(last_used_at <= at - make_interval(secs => :every), true)
        FOR NO KEY UPDATE OF api_token SKIP LOCKED)
    UPDATE ledger.api_token token SET last_used_at = at FROM held, clock WHERE token.id = held.id
""")


def create(
    connection: Connection,
    name: str,
    *,
    scopes: Collection[str],
    types: Collection[str] = (),
    expires_in: timedelta | None = None,
) -> tuple[str, datetime | None]:
    """Create a token and return its secret, which cannot be read again, and its expiry."""
    if not _NAME.fullmatch(name):
        raise Misuse(f"{name!r} is not a valid token name: it may have 1 to 100 letters, digits, and _ . @ - only.")
    if unknown := sorted(set(scopes) - set(Scope)):
        raise Misuse(f"There is no scope {unknown[0]!r}. Known: {', '.join(Scope)}.")
    if not scopes:
        raise Misuse(f"A token needs at least one scope. Known: {', '.join(Scope)}.")
    _check_types(scopes, types)
    if expires_in is not None and not timedelta() < expires_in <= LONGEST:
        raise Misuse("A token must expire after at least one second and at most a hundred years.")
    token = PREFIX + secrets.token_urlsafe(32)
    values = {
        "name": name,
        "sha": _sha(token),
        "scopes": sorted(set(scopes)),
        "types": sorted(set(types)),
        "expires_in": expires_in,
    }
    created = connection.execute(CREATE, values).one_or_none()
    if created is None:
        raise TokenExists(f"A valid token {name!r} exists: revoke it first, or choose another name.")
    return token, created.expires_at


def find_or_create(connection: Connection, name: str, *, scopes: Collection[str]) -> bytes:
    """Return the hash of the valid token with this name. If there is none, create one whose secret is not kept."""
    with suppress(TokenExists):
        create(connection, name, scopes=scopes)
    return find_valid(connection, name)


def find_valid(connection: Connection, name: str) -> bytes:
    """Return the hash of the valid token with this name, or raise UnknownToken."""
    sha = connection.execute(FIND_VALID, {"name": name}).scalar_one_or_none()
    if sha is None:
        raise UnknownToken(f"There is no valid token {name!r}.")
    return bytes(sha)


def list_tokens(connection: Connection) -> list[ListedToken]:
    """Return all tokens, including revoked and expired ones, ordered by name."""
    return [ListedToken(*row) for row in connection.execute(LIST)]


def revoke(connection: Connection, name: str) -> None:
    """Revoke a token: it is rejected from the commit on. Revoking it again changes nothing."""
    if not connection.execute(REVOKE, {"name": name}).rowcount:
        raise UnknownToken(f"There is no token {name!r}.")


def authenticate(engine: Engine, secret: str) -> Token:
    """Return the token with this secret, or raise Unauthenticated. The error never repeats the secret."""
    if not _TOKEN.fullmatch(secret):
        raise Unauthenticated(f"Unknown token: a token begins with {PREFIX}.")
    sha = _sha(secret)
    values = {"sha": sha, "every": RECORD_USE_SECONDS}
    with engine.connect() as connection:
        found = connection.execute(LOOK_UP, values).one_or_none()
        if found is None or not hmac.compare_digest(bytes(found.token_sha256), sha):
            raise Unauthenticated("Unknown token.")
        if found.is_revoked:
            raise Unauthenticated("The token was revoked.")
        if found.is_expired:
            raise Unauthenticated("The token has expired.")
        if found.is_stale:
            connection.execute(RECORD_USE, values)
            connection.commit()
    return Token(found.name, frozenset(found.scopes), tuple(found.types))


def _check_types(scopes: Collection[str], types: Collection[str]) -> None:
    if types and Scope.TASKS_SUBMIT not in scopes:
        raise Misuse(f"A list of types has no effect without the scope {Scope.TASKS_SUBMIT}.")
    for pattern in types:
        if not _PATTERN.fullmatch(pattern):
            raise Misuse(f"{pattern[:100]!r} is not a pattern of types: use letters, digits, . _ : - and * ? [ ].")
        if (scope := SCOPE_OF_TYPE.get(pattern)) and scope not in scopes:
            raise Misuse(f"The type {pattern} has a scope of its own: add {scope}.")


def _sha(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
