"""The SQL function `ingest_submit`: what a program that has never heard of us may do, and what it is told."""

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
from outbox.canonical import MAX_BYTES
from outbox.relay import Relay
from tasks import NewTask
from tasks.core.registry import NAME
from tasks.core.task_ids import keyed_id
from tasks.execution.deliver import ingest
from tasks.submission.envelope import KEY_LIMIT, checked
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.work import rows, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")


@pytest.fixture(autouse=True)
def _handlers(stack: ServersOfTests) -> None:
    work.register()


@pytest.fixture
def connection(stack: ServersOfTests) -> Iterator[Connection]:
    with engine().connect() as connection:
        yield connection


@pytest.fixture
def stranger(database: str, stack: ServersOfTests) -> Iterator[Any]:
    """A program that has never heard of us, in a transaction of its own."""
    connection = psycopg2.connect(database.replace("+psycopg2", ""))
    yield connection.cursor()
    connection.close()


@pytest.fixture
def relay(stack: ServersOfTests) -> Iterator[Relay]:
    relay = Relay.of(settings.current())
    yield relay
    relay.close()


def test_a_stranger_submits_in_its_own_transaction_and_the_relay_wakeups(
    stranger: Any, relay: Relay, stack: ServersOfTests
) -> None:
    stranger.execute("SELECT celeriac.ingest_submit('test.insert', '{\"n\": 1}')")
    stranger.connection.rollback()
    assert len(rows()) == len(wakeups()) == 0
    stranger.execute("SELECT celeriac.ingest_submit('test.insert', '{\"n\": 1}')")
    stranger.connection.commit()
    ((id_, key),) = rows("id, idempotency_key")
    assert (id_.version, key) == (7, None)
    assert transitions(id_, "to_status, actor = CURRENT_USER") == [("QUEUED", True)]
    assert [(wakeup.status, wakeup.is_leased) for wakeup in wakeups()] == [("NEW", False)]
    assert relay.tick().sent == 1
    assert arrived(stack) == {str(id_): 1}
    work.sink()
    ingest(engine(), [id_])
    assert work.effects() == {id_: 1}


def test_a_stranger_names_what_it_means_and_is_told_the_rest(stranger: Any) -> None:
    stranger.execute("SELECT celeriac.ingest_submit(type => 'any.type', payload => NULL, queue => 'slow', key => 'k')")
    stranger.connection.commit()
    columns = "type, payload, queue, priority, max_attempts, context, idempotency_key"
    assert rows(columns) == [("any.type", None, "slow", 5, 10, {}, "k")]
    assert rows("payload = 'null'") == [(True,)]  # as None in Python, and not SQL's NULL
    assert settings.current().ingest_max_attempts == 10


def test_a_conflict_has_a_code_of_its_own_and_names_the_task(stranger: Any) -> None:
    stranger.execute("SELECT celeriac.ingest_submit('test.insert', '1', 'k')")
    (id_,) = stranger.fetchone()
    stranger.connection.commit()
    with pytest.raises(psycopg2.Error, match=f"The key belongs to the task {id_}, which has another payload.") as error:
        stranger.execute("SELECT celeriac.ingest_submit('test.insert', '2', 'k')")
    assert error.value.pgcode == "CL409"


@pytest.mark.parametrize(("wait", "is_due"), [("-1 day", True), ("0", True), ("1 hour", False)])
def test_a_stranger_says_when(wait: str, is_due: bool, stranger: Any, relay: Relay, stack: ServersOfTests) -> None:
    stranger.execute(
        "SELECT celeriac.ingest_submit('test.insert', '1', run_at => celeriac.ledger_now() + %s::interval)", (wait,)
    )
    stranger.connection.commit()
    assert rows("next_retry_at IS NULL, last_wakeup_at = coalesce(next_retry_at, created_at)") == [(is_due, True)]
    assert relay.tick().sent == is_due
    move(stack, 3601)
    assert relay.tick().sent == (not is_due)


def test_what_one_lane_refuses_as_type_key_or_payload_the_other_refuses_too(stranger: Any) -> None:
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
        assert (_code(stranger, "test.insert", "1", key) is None) == _is_good(NewTask("test.insert", 1, key)), repr(key)
    for type_ in types:
        assert (_code(stranger, type_, "1", None) is None) == bool(NAME.fullmatch(type_)), repr(type_)
    assert _code(stranger, "", "1", None) == _code(stranger, None, "1", "k") == _code(stranger, "t", "1", "") == "CL400"
    assert _code(stranger, "t", json.dumps("x" * (MAX_BYTES - 1)), None) == "CL413"
    assert _code(stranger, "t", json.dumps("x" * (MAX_BYTES - 2)), None) is None
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
def test_what_one_lane_refuses_as_too_much_the_other_refuses_too(payload: str, stranger: Any) -> None:
    expected = None if _can_be_given(payload) else "CL400"
    assert _code(stranger, "test.insert", payload, None) == expected


def _can_be_given(payload: str) -> bool:
    try:
        return _is_good(NewTask("test.insert", json.loads(payload)))
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize(
    ("run_at", "code"), [("9000-01-01 00:00+00", None), ("20000-01-01", "CL400"), ("infinity", "CL400")]
)
def test_a_time_that_nobody_can_show_is_refused(run_at: str, code: str | None, stranger: Any) -> None:
    found = None
    try:
        stranger.execute("SELECT celeriac.ingest_submit('test.insert', '1', run_at => %s)", (run_at,))
    except psycopg2.Error as error:
        found = error.pgcode
    assert found == code


def test_whoever_names_no_queue_gets_the_usual_one(stranger: Any) -> None:
    stranger.execute("SELECT celeriac.ingest_submit('test.insert', '1', NULL, NULL, NULL)")
    stranger.connection.commit()
    assert rows("queue") == [("ingest",)]


def _code(stranger: Any, type_: str | None, payload: str, key: str | None) -> str | None:
    """The SQLSTATE of a refusal."""
    code: str | None = None
    try:
        stranger.execute("SELECT celeriac.ingest_submit(%s, %s, %s)", (type_, payload, key))
    except psycopg2.Error as error:
        code = error.pgcode
    stranger.connection.rollback()
    return code


def _is_good(new: NewTask) -> bool:
    try:
        checked(new)
    except Misuse:
        return False
    return True


def test_the_function_finds_its_tables_from_any_search_path(stranger: Any) -> None:
    stranger.execute("SET search_path = pg_catalog")
    stranger.execute("SELECT public.ingest_submit('test.insert', '1', 'k'), public.ingest_submit('test.insert', '1')")
    stranger.connection.commit()
    assert len(rows()) == len(wakeups()) == 2
    stranger.execute("SHOW search_path")
    assert stranger.fetchone() == ("pg_catalog",)


Pair = tuple[str, str]


def _as_list(pairs: list[Pair]) -> Pair:
    return f"[{','.join(one for one, _ in pairs)}]", f"[{','.join(other for _, other in pairs)}]"


def _as_object(pairs: list[tuple[str, Pair]]) -> Pair:
    one, other = (",".join(f"{name}:{pair[side]}" for name, pair in pairs) for side in (0, 1))
    return f"{{{one}}}", f"{{{other}}}"


# Two writings of one value, or of two that look much the same.
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
def test_the_hash_in_a_tombstone_is_equal_exactly_where_jsonb_is(pairs: list[Pair], connection: Connection) -> None:
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
