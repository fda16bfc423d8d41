"""Tokens: only their hash is kept, and what an operator types about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

from api import tokens
from api.tokens import PREFIX, Scope, TokenExists, Unauthenticated
from models.clock import now
from models.engine import engine
from models.sql import sql
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests
from tests.tasks.door import manage

pytestmark = pytest.mark.usefixtures("stack")
# what is typed after `token create`, and what is said of it
REFUSED = [
    (("ci",), "without a scope"),
    (("ci", "--scope", "tasks:everything"), "no scope 'tasks:everything'"),
    (("a:b", "--scope", "tasks:read"), "no name of a token"),
    (("", "--scope", "tasks:read"), "no name of a token"),
    (("ci\n", "--scope", "tasks:read"), "no name of a token"),
    (("ci", "--scope", "tasks:read", "--expires-in", "0s"), "a second at the earliest"),
    (("ci", "--scope", "tasks:read", "--expires-in", "999999d"), "a hundred years at the latest"),
    (("ci", "--scope", "tasks:read", "--expires-in", "soon"), "is not a duration"),
    (("ci", "--scope", "tasks:read", "--expires-in", "2100-01-01"), "is not a duration"),
    (("ci", "--scope", "tasks:read", "--expires-in", ""), "is not a duration"),
]


@pytest.fixture
def connection(stack: ServersOfTests) -> Iterator[Connection]:
    with engine().begin() as connection:
        yield connection


def test_the_ledger_keeps_the_hash_of_a_token_and_nothing_else_of_it() -> None:
    token = manage("token", "create", "ci", "--scope", "tasks:submit").out.strip()
    assert token.startswith(PREFIX)
    with engine().connect() as connection:
        row = dict(connection.execute(sql("SELECT * FROM ledger.api_token")).mappings().one())
    assert bytes(row["token_sha256"]) == hashlib.sha256(token.encode()).digest()
    assert token.removeprefix(PREFIX) not in str(row)
    assert tokens.look_up(engine(), token) == tokens.Token("ci", frozenset({"tasks:submit"}))


def test_a_token_is_shown_once_and_alone() -> None:
    done = manage("token", "create", "ci", "--scope", "tasks:submit")
    assert (done.code, len(done.out.split())) == (0, 1)
    assert "nobody can be shown it again" in done.err
    shown = manage("token", "list").out + manage("token", "list", "--json").out
    assert "ci" in shown
    assert done.out.strip() not in shown


def test_a_token_for_a_program() -> None:
    options = ("--scope", "tasks:submit", "--scope", "tasks:read", "--scope", "tasks:read", "--expires-in", "30d")
    made = manage("token", "create", "ci", *options, "--json").json
    assert (made["name"], made["scopes"]) == ("ci", ["tasks:read", "tasks:submit"])
    tokens.look_up(engine(), made["token"])
    (listed,) = manage("token", "list", "--json").json
    assert (listed["name"], listed["state"], listed["scopes"]) == ("ci", "active", made["scopes"])
    lifetime = datetime.fromisoformat(listed["expiresAt"]) - datetime.fromisoformat(listed["createdAt"])
    assert lifetime == timedelta(days=30)
    assert listed["expiresAt"] == made["expiresAt"]
    assert listed["revokedAt"] is None


def test_what_cannot_be_a_token_is_misuse() -> None:
    for arguments, sentence in REFUSED:
        done = manage("token", "create", *arguments)
        assert (done.code, sentence in done.err) == (2, True), done.err
    assert manage("token", "list", "--json").json == []


def test_a_name_belongs_to_one_valid_token() -> None:
    first = manage("token", "create", "ci", "--scope", "tasks:read").out.strip()
    done = manage("token", "create", "ci", "--scope", "tasks:submit")
    assert (done.code, "revoke it first" in done.err) == (2, True)
    tokens.look_up(engine(), first)
    assert manage("token", "revoke", "ci").code == 0
    assert manage("token", "revoke", "ci").code == 0  # once more changes nothing
    assert [each["state"] for each in manage("token", "list", "--json").json] == ["revoked"]
    second = manage("token", "create", "ci", "--scope", "tasks:submit").out.strip()
    assert tokens.look_up(engine(), second).scopes == {"tasks:submit"}
    with pytest.raises(Unauthenticated):
        tokens.look_up(engine(), first)


def test_who_is_not_there_cannot_be_revoked() -> None:
    done = manage("token", "revoke", "nobody")
    assert (done.code, done.err) == (2, "manage.py: There is no token 'nobody'.\n")


def test_an_expired_name_is_free(stack: ServersOfTests, connection: Connection) -> None:
    tokens.create(connection, "ci", scopes=["tasks:read"], expires_in=timedelta(hours=1))
    with pytest.raises(TokenExists):
        tokens.create(connection, "ci", scopes=["tasks:read"])
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(hours=1))
    assert [each.state for each in tokens.listed(connection)] == ["expired"]
    tokens.create(connection, "ci", scopes=["tasks:read"])
    assert [each.state for each in tokens.listed(connection)] == ["active"]


def test_the_last_use_is_written_once_a_minute_and_waits_for_nobody(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        token, _ = tokens.create(connection, "ci", scopes=["tasks:read"])
    with engine().begin() as other:
        other.execute(sql("SELECT FROM ledger.api_token FOR UPDATE"))
        tokens.look_up(engine(), token)  # somebody holds the row: let them
    assert _last_used_at() is None
    tokens.look_up(engine(), token)
    first = _last_used_at()
    tokens.look_up(engine(), token)
    assert _last_used_at() == first is not None
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(seconds=tokens.USED_EVERY_SECONDS))
    tokens.look_up(engine(), token)
    with engine().connect() as connection:
        assert timedelta() <= now(connection) - _last_used_at() < timedelta(seconds=5)


def test_scopes_of_newer_code_are_no_harm(connection: Connection) -> None:
    token, _ = tokens.create(connection, "ci", scopes=["tasks:read"])
    connection.execute(sql("UPDATE ledger.api_token SET scopes = scopes || '{queues:pause}'"))
    connection.commit()
    assert not tokens.look_up(engine(), token).may(*(scope for scope in Scope if scope != Scope.TASKS_READ))


def test_a_refusal_repeats_nothing_of_what_was_given() -> None:
    for given in ("hunter2", PREFIX + "h" * 43):
        with pytest.raises(Unauthenticated) as refused:
            tokens.look_up(engine(), given)
        assert given not in refused.value.message


def test_help_names_every_scope() -> None:
    shown = manage("token", "create", "--help").out
    assert [scope for scope in Scope if scope not in shown] == []


def _last_used_at() -> Any:
    with engine().connect() as connection:
        return connection.execute(sql("SELECT last_used_at FROM ledger.api_token")).scalar_one()
