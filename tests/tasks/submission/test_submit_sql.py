"""The SQL function `ingest_submit`, for programs that do not import Celeriac."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from sqlalchemy import Connection

import settings
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from outbox.canonical_json import MAX_BYTES
from outbox.relay import Relay
from tasks import NewTask
from tasks.core.registry import NAME
from tasks.core.task_ids import keyed_id
from tasks.execution.deliver import deliver
from tasks.submission.envelope import KEY_LIMIT, check_task
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.registrations import registered
from tests.tasks.work import rows, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")


@pytest.fixture
def client(database: str, stack: ServersOfTests) -> Iterator[Any]:
    """A cursor of plain psycopg2, as another program would use."""
    connection = psycopg2.connect(database.replace("+psycopg2", ""))
    yield connection.cursor()
    connection.close()


def test_a_client_submits_in_its_own_transaction_and_the_relay_publishes_the_wakeup(
    client: Any, relay: Relay, stack: ServersOfTests
) -> None:
    client.execute("SELECT celeriac.ingest_submit('test.insert', '{\"n\": 1}')")
    client.connection.rollback()
    assert len(rows()) == len(wakeups()) == 0
    client.execute("SELECT celeriac.ingest_submit('test.insert', '{\"n\": 1}')")
    client.connection.commit()
    ((id_, key),) = rows("id, idempotency_key")
    assert (id_.version, key) == (7, None)
    assert transitions(id_, "to_status, actor = CURRENT_USER") == [("QUEUED", True)]
    assert [(wakeup.status, wakeup.is_leased) for wakeup in wakeups()] == [("NEW", False)]
    assert relay.tick().sent == 1
    assert arrived(stack) == {str(id_): 1}
    work.sink()
    deliver(engine(), [id_])
    assert work.effects() == {id_: 1}


def test_arguments_that_are_not_given_have_defaults(client: Any) -> None:
    registered({}, ingest_queues=("ingest", "slow"))
    client.execute("SELECT celeriac.ingest_submit(type => 'any.type', payload => NULL, queue => 'slow', key => 'k')")
    client.connection.commit()
    columns = "type, payload, queue, priority, max_attempts, context, idempotency_key"
    assert rows(columns) == [("any.type", None, "slow", 5, 10, {}, "k")]
    assert rows("payload = 'null'") == [(True,)]  # JSON null, as for None in Python, not SQL's NULL
    assert settings.current().ingest_max_attempts == 10


def test_a_conflict_has_its_own_code_and_names_the_task(client: Any) -> None:
    client.execute("SELECT celeriac.ingest_submit('test.insert', '1', 'k')")
    (id_,) = client.fetchone()
    client.connection.commit()
    with pytest.raises(psycopg2.Error, match=f"The key belongs to the task {id_}, which has another payload.") as error:
        client.execute("SELECT celeriac.ingest_submit('test.insert', '2', 'k')")
    assert error.value.pgcode == "CL409"


@pytest.mark.parametrize(("wait", "is_due"), [("-1 day", True), ("0", True), ("1 hour", False)])
def test_a_task_is_not_woken_before_run_at(
    wait: str, is_due: bool, client: Any, relay: Relay, stack: ServersOfTests
) -> None:
    client.execute(
        "SELECT celeriac.ingest_submit('test.insert', '1', run_at => celeriac.ledger_now() + %s::interval)", (wait,)
    )
    client.connection.commit()
    assert rows("next_retry_at IS NULL, last_wakeup_at = coalesce(next_retry_at, created_at)") == [(is_due, True)]
    assert relay.tick().sent == is_due
    move(stack, 3601)
    assert relay.tick().sent == (not is_due)


def test_sql_and_python_refuse_the_same_types_and_keys(client: Any) -> None:
    types = ["", " ", "a b", "a\n", "é", "-a", "a" * 101, "a" * 100, "a.b_c:d-1", "A", "1"]
    keys = [
        "",
        "a\x1fb",
        "\t",
        "a\n",
        "\x7f",
        "\x80",
        "\x9f",
        "k" * 501,
        "k" * 500,
        " ",
        "\xa0",
        "👩‍👩‍👧",
        "\u2028",
        "é" * 500,
    ]
    for key in keys:
        assert (_code(client, "test.insert", "1", key) is None) == _is_valid(NewTask("test.insert", 1, key)), repr(key)
    for type_ in types:
        assert (_code(client, type_, "1", None) is None) == bool(NAME.fullmatch(type_)), repr(type_)
    assert _code(client, "", "1", None) == _code(client, None, "1", "k") == _code(client, "t", "1", "") == "CL400"
    assert _code(client, "t", json.dumps("x" * (MAX_BYTES - 1)), None) == "CL413"
    assert _code(client, "t", json.dumps("x" * (MAX_BYTES - 2)), None) is None
    assert len("k" * 500) == KEY_LIMIT


def _nested(levels: int, inner: str, kind: str) -> str:
    opened, closed = {"array": ("[", "]"), "object": ('{"a":', "}"), "both": ('[{"a":', "}]")}[kind]
    return opened * levels + inner + closed * levels


PAYLOADS = {
    "64 arrays": _nested(64, "1", "array"),
    "65 arrays": _nested(65, "1", "array"),
    "64 objects": _nested(64, "null", "object"),
    "65 objects": _nested(65, "null", "object"),
    "64 of both": _nested(32, "1", "both"),
    "66 of both": _nested(33, "1", "both"),
    "an empty one as the 65th": _nested(64, "[]", "array"),
    "3000 arrays": _nested(3000, "", "array"),
    "many brackets in text": json.dumps("[{" * 1000),
    "many arrays side by side": json.dumps([[]] * 1000),
    "10,000 keys": json.dumps({str(n): n for n in range(10_000)}),
    "10,001 keys": json.dumps({str(n): n for n in range(10_001)}),
    "10,001 keys in 2 objects": json.dumps([{str(n): n for n in range(10_000)}, {"a": 1}]),
    "many colons in text": json.dumps([":" * 20_000]),
    "4,300 digits": "9" * 4300,
    "4,301 digits": "1" + "0" * 4300,
    "4,301 digits, negative": json.dumps({"a": [0]}).replace("0", "-1" + "0" * 4300),
    "many digits in text": json.dumps("9" * 5000),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_sql_and_python_refuse_the_same_payloads(payload: str, client: Any) -> None:
    expected = None if _is_accepted_by_python(payload) else "CL400"
    assert _code(client, "test.insert", payload, None) == expected


def _is_accepted_by_python(payload: str) -> bool:
    try:
        return _is_valid(NewTask("test.insert", json.loads(payload)))
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize(
    ("run_at", "code"), [("9000-01-01 00:00+00", None), ("20000-01-01", "CL400"), ("infinity", "CL400")]
)
def test_a_time_that_python_cannot_represent_is_refused(run_at: str, code: str | None, client: Any) -> None:
    found = None
    try:
        client.execute("SELECT celeriac.ingest_submit('test.insert', '1', run_at => %s)", (run_at,))
    except psycopg2.Error as error:
        found = error.pgcode
    assert found == code


def test_a_null_queue_means_the_default_queue(client: Any) -> None:
    client.execute("SELECT celeriac.ingest_submit('test.insert', '1', NULL, NULL, NULL)")
    client.connection.commit()
    assert rows("queue") == [("ingest",)]


def _code(client: Any, type_: str | None, payload: str, key: str | None) -> str | None:
    """Return the SQLSTATE of the error, or None."""
    code: str | None = None
    try:
        client.execute("SELECT celeriac.ingest_submit(%s, %s, %s)", (type_, payload, key))
    except psycopg2.Error as error:
        code = error.pgcode
    client.connection.rollback()
    return code


def _is_valid(new: NewTask) -> bool:
    try:
        check_task(new)
    except Misuse:
        return False
    return True


def test_the_function_works_with_any_search_path(client: Any) -> None:
    client.execute("SET search_path = pg_catalog")
    client.execute("SELECT celeriac.ingest_submit('test.insert', '1', 'k'), celeriac.ingest_submit('test.insert', '1')")
    client.connection.commit()
    assert len(rows()) == len(wakeups()) == 2
    client.execute("SHOW search_path")
    assert client.fetchone() == ("pg_catalog",)


Pair = tuple[str, str]


def _as_list(pairs: list[Pair]) -> Pair:
    return f"[{','.join(one for one, _ in pairs)}]", f"[{','.join(other for _, other in pairs)}]"


def _as_object(pairs: list[tuple[str, Pair]]) -> Pair:
    one, other = (",".join(f"{name}:{pair[side]}" for name, pair in pairs) for side in (0, 1))
    return f"{{{one}}}", f"{{{other}}}"


# Pairs of texts: two notations of one value, or two similar values.
NEAR = (
    "1 1.0, -2 -2.00, 0 -0.0, 0.5 0.500, 10 1.0e1, 100.50 100.5, 1 10, 0.5 0.05, 0.10 0.01, 0.5005 0.55, 1.005 1.5,"
    ' "1.0" "1", "a.50" "a.5", 1 "1", null "null", [] {}'
)
TEXT = st.text('a".\\0,5', max_size=4).map(json.dumps)
JSON = st.recursive(
    st.sampled_from([(one, other) for one, other in map(str.split, NEAR.split(","))])
    | TEXT.map(lambda text: (text, text)),
    lambda inner: (
        st.lists(inner, max_size=4).map(_as_list) | st.lists(st.tuples(TEXT, inner), max_size=3).map(_as_object)
    ),
    max_leaves=5,
)
with_fixtures = given_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(pairs=st.lists(JSON, min_size=20, max_size=40))
@with_fixtures
def test_the_hash_in_a_tombstone_is_equal_if_and_only_if_jsonb_is(pairs: list[Pair], connection: Connection) -> None:
    statement = sql("""
        SELECT one, other FROM unnest(CAST(:ones AS jsonb[]), CAST(:others AS jsonb[])) AS pair(one, other)
        WHERE (one = other) <> (ledger.ingest_payload_sha(one) = ledger.ingest_payload_sha(other))""")
    ones, others = ([pair[side] for pair in pairs] for side in (0, 1))
    assert connection.execute(statement, {"ones": ones, "others": others}).all() == []


@given(keys=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30), min_size=1))
@with_fixtures
def test_a_key_has_the_same_id_in_python_and_in_sql(keys: list[str], connection: Connection) -> None:
    statement = sql("SELECT ledger.ingest_task_id('test.insert', key) FROM unnest(CAST(:keys AS text[])) AS key")
    assert [*connection.execute(statement, {"keys": keys}).scalars()] == [keyed_id("test.insert", key) for key in keys]
