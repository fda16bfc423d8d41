"""API tokens: only a hash is stored, and the commands `manage.py token create|list|revoke`."""

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
from tests.tasks.command_line import manage

pytestmark = pytest.mark.usefixtures("stack")
INVALID = [  # arguments of `token create`, part of the message
    (("ci",), "needs at least one scope"),
    (("ci", "--scope", "tasks:everything"), "no scope 'tasks:everything'"),
    (("a:b", "--scope", "tasks:read"), "not a valid token name"),
    (("", "--scope", "tasks:read"), "not a valid token name"),
    (("ci\n", "--scope", "tasks:read"), "not a valid token name"),
    (("ci", "--scope", "tasks:read", "--type", "invoice.*"), "no effect without the scope tasks:submit"),
    (("ci", "--scope", "tasks:submit", "--type", "a b"), "not a pattern of types"),
    (("ci", "--scope", "tasks:submit", "--type", ""), "not a pattern of types"),
    (("ci", "--scope", "tasks:submit", "--type", "http.request"), "add http:request"),
    (("ci", "--scope", "tasks:read", "--expires-in", "0s"), "at least one second"),
    (("ci", "--scope", "tasks:read", "--expires-in", "999999d"), "at most a hundred years"),
    (("ci", "--scope", "tasks:read", "--expires-in", "soon"), "is not a duration"),
    (("ci", "--scope", "tasks:read", "--expires-in", "2100-01-01"), "is not a duration"),
    (("ci", "--scope", "tasks:read", "--expires-in", ""), "is not a duration"),
]


@pytest.fixture
def connection(stack: ServersOfTests) -> Iterator[Connection]:
    with engine().begin() as connection:
        yield connection


def test_the_ledger_stores_only_the_hash_of_a_token() -> None:
    token = manage("token", "create", "ci", "--scope", "tasks:submit").out.strip()
    assert token.startswith(PREFIX)
    with engine().connect() as connection:
        row = dict(connection.execute(sql("SELECT * FROM ledger.api_token")).mappings().one())
    assert bytes(row["token_sha256"]) == hashlib.sha256(token.encode()).digest()
    assert token.removeprefix(PREFIX) not in str(row)
    assert tokens.authenticate(engine(), token) == tokens.Token("ci", frozenset({"tasks:submit"}))


def test_a_token_is_printed_once_and_alone_on_stdout() -> None:
    done = manage("token", "create", "ci", "--scope", "tasks:submit")
    assert (done.code, len(done.out.split())) == (0, 1)
    assert "it cannot be shown again" in done.err
    shown = manage("token", "list").out + manage("token", "list", "--json").out
    assert "ci" in shown
    assert done.out.strip() not in shown


def test_create_and_list_print_the_same_token_as_json() -> None:
    options = ("--scope", "tasks:submit", "--scope", "tasks:read", "--scope", "tasks:read", "--expires-in", "30d")
    made = manage("token", "create", "ci", *options, "--json").json
    assert (made["name"], made["scopes"]) == ("ci", ["tasks:read", "tasks:submit"])
    tokens.authenticate(engine(), made["token"])
    (listed,) = manage("token", "list", "--json").json
    assert (listed["name"], listed["state"], listed["scopes"]) == ("ci", "active", made["scopes"])
    lifetime = datetime.fromisoformat(listed["expiresAt"]) - datetime.fromisoformat(listed["createdAt"])
    assert lifetime == timedelta(days=30)
    assert listed["expiresAt"] == made["expiresAt"]
    assert listed["revokedAt"] is None


def test_the_types_of_a_token_are_stored_listed_and_replaced_with_the_token() -> None:
    options = ("--scope", "tasks:submit", "--type", "refund.*", "--type", "invoice.*")
    made = manage("token", "create", "billing", *options, "--json").json
    assert made["types"] == ["invoice.*", "refund.*"]
    assert tokens.authenticate(engine(), made["token"]).types == ("invoice.*", "refund.*")
    assert manage("token", "list", "--json").json[0]["types"] == made["types"]
    assert "invoice.* refund.*" in manage("token", "list").out
    manage("token", "revoke", "billing")
    again = manage("token", "create", "billing", "--scope", "tasks:submit").out.strip()
    assert tokens.authenticate(engine(), again).types == ()


def test_invalid_arguments_create_no_token() -> None:
    for arguments, part in INVALID:
        done = manage("token", "create", *arguments)
        assert (done.code, part in done.err) == (2, True), done.err
    assert manage("token", "list", "--json").json == []


def test_a_name_belongs_to_one_valid_token() -> None:
    first = manage("token", "create", "ci", "--scope", "tasks:read").out.strip()
    done = manage("token", "create", "ci", "--scope", "tasks:submit")
    assert (done.code, "revoke it first" in done.err) == (2, True)
    tokens.authenticate(engine(), first)
    assert manage("token", "revoke", "ci").code == 0
    assert manage("token", "revoke", "ci").code == 0  # revoking again changes nothing
    assert [each["state"] for each in manage("token", "list", "--json").json] == ["revoked"]
    second = manage("token", "create", "ci", "--scope", "tasks:submit").out.strip()
    assert tokens.authenticate(engine(), second).scopes == {"tasks:submit"}
    with pytest.raises(Unauthenticated):
        tokens.authenticate(engine(), first)


def test_revoking_an_unknown_token_is_an_error() -> None:
    done = manage("token", "revoke", "unknown")
    assert (done.code, done.err) == (2, "manage.py: There is no token 'unknown'.\n")


def test_the_name_of_an_expired_token_can_be_used_again(stack: ServersOfTests, connection: Connection) -> None:
    tokens.create(connection, "ci", scopes=["tasks:read"], expires_in=timedelta(hours=1))
    with pytest.raises(TokenExists):
        tokens.create(connection, "ci", scopes=["tasks:read"])
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(hours=1))
    assert [each.state for each in tokens.list_tokens(connection)] == ["expired"]
    tokens.create(connection, "ci", scopes=["tasks:read"])
    assert [each.state for each in tokens.list_tokens(connection)] == ["active"]


def test_the_last_use_is_written_at_most_once_a_minute_and_never_waits_for_a_lock(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        token, _ = tokens.create(connection, "ci", scopes=["tasks:read"])
    with engine().begin() as other:
        other.execute(sql("SELECT FROM ledger.api_token FOR UPDATE"))
        tokens.authenticate(engine(), token)  # the row is locked, so the use is not recorded
    assert _last_used_at() is None
    tokens.authenticate(engine(), token)
    first = _last_used_at()
    tokens.authenticate(engine(), token)
    assert _last_used_at() == first is not None
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(seconds=tokens.RECORD_USE_SECONDS))
    tokens.authenticate(engine(), token)
    with engine().connect() as connection:
        assert timedelta() <= now(connection) - _last_used_at() < timedelta(seconds=5)


def test_an_unknown_scope_in_the_ledger_grants_nothing(connection: Connection) -> None:
    token, _ = tokens.create(connection, "ci", scopes=["tasks:read"])
    connection.execute(sql("UPDATE ledger.api_token SET scopes = scopes || '{queues:pause}'"))
    connection.commit()
    assert not tokens.authenticate(engine(), token).has_scope(*(scope for scope in Scope if scope != Scope.TASKS_READ))


def test_an_authentication_error_does_not_repeat_the_secret() -> None:
    for secret in ("hunter2", PREFIX + "h" * 43):
        with pytest.raises(Unauthenticated) as caught:
            tokens.authenticate(engine(), secret)
        assert secret not in caught.value.message


def test_help_lists_every_scope() -> None:
    shown = manage("token", "create", "--help").out
    assert [scope for scope in Scope if scope not in shown] == []


def _last_used_at() -> Any:
    with engine().connect() as connection:
        return connection.execute(sql("SELECT last_used_at FROM ledger.api_token")).scalar_one()
