"""The language of the search box: what is written can be read again, errors are sentences, words are understood."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.tokens import Forbidden, Scope, Token, authenticate
from console import task_search
from console.task_search import (
    LONGEST,
    Name,
    Query,
    Term,
    filter_of,
    only_id,
    parse,
    require_visible,
    tasks_path,
    understand,
)
from models.engine import engine
from models.errors import Misuse
from models.status import TaskStatus
from tasks.core.outcomes import ErrorCode
from tests.api.callers import make_token
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried, submitted

AT = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
ID = "01902f5a-7c1e-7d3b-9c4a-5e6f70819203"
OTHER = "01902f5a-7c1e-7d3b-9c4a-5e6f70819204"
# What the language gives a meaning: quotes, backslashes, colons, spaces of every kind, names of terms.
texts = st.one_of(
    st.text(min_size=1, max_size=40),
    st.text(st.sampled_from('a"\\: \t\n\x0b\x85\xa0\u2003,'), min_size=1, max_size=12),
    st.sampled_from(["status:dead", 'type:"x', "key:", '"', "\\", '\\"', ":", "text:\\", "a b", ' "a" ', "http://x"]),
).filter(lambda text: not task_search._CONTROL.search(text))
ages = st.from_regex(r"[0-9]{1,5}[smhd]", fullmatch=True)
times = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)).map(lambda at: at.isoformat(timespec="seconds"))
VALUES = {
    Name.STATUS: st.lists(st.sampled_from(TaskStatus), min_size=1, unique=True).map(
        lambda found: ",".join(each.lower() for each in TaskStatus if each in found)
    ),
    Name.ID: st.lists(st.uuids().map(str), min_size=1, max_size=5, unique=True).map(",".join),
    Name.ERROR: st.sampled_from(ErrorCode).map(str),
    Name.SINCE: st.one_of(ages, times),
    Name.UNTIL: st.one_of(ages, times),
}
queries = (
    st.lists(st.sampled_from(Name), unique=True, max_size=6)
    .flatmap(lambda names: st.tuples(*(st.builds(Term, st.just(name), VALUES.get(name, texts)) for name in names)))
    .map(Query)
    .filter(lambda query: len(str(query)) <= LONGEST)
)


def token_of(*scopes: Scope) -> Token:
    return authenticate(engine(), make_token(f"t-{uuid.uuid4()}", *scopes))


def understood(text: str) -> str:
    with engine().connect() as connection:
        return str(understand(connection, parse(text)))


def refusal(text: str) -> str:
    with pytest.raises(Misuse) as caught:
        parse(text)
    sentence = caught.value.message
    assert sentence.endswith(".")
    assert sentence[0].isupper() or sentence.partition(":")[0] in list(Name) or sentence.startswith("'")
    return sentence


def test_a_link_to_tasks_is_read_as_the_search_that_it_was_made_of() -> None:
    path, _, query = tasks_path(type='say "hi" to: you', queue="a b", status="dead").partition("?")
    assert path == "/console/tasks"
    (text,) = parse_qs(query)["q"]
    assert parse(text).terms == (
        Term(Name.TYPE, 'say "hi" to: you'),
        Term(Name.QUEUE, "a b"),
        Term(Name.STATUS, "dead"),
    )


@given(queries)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # its first example reads Unicode's tables
def test_what_is_written_is_read_as_the_same(query: Query) -> None:
    assert parse(str(query)) == query


@given(st.one_of(st.text(), st.text(st.sampled_from('a"\\: ,\t'), max_size=30)))
def test_any_text_is_either_read_or_refused_with_a_sentence(text: str) -> None:
    try:
        query = parse(text)
    except Misuse:
        assert refusal(text)
    else:
        assert parse(str(query)) == query
        assert len(str(query)) <= LONGEST


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", []),
        ("  \n ", []),
        ("type:document.ingest status:dead", [("type", "document.ingest"), ("status", "dead")]),
        ("TYPE:a Status:DEAD", [("type", "a"), ("status", "dead")]),
        ("status:dead status:queued,RETRY", [("status", "queued,retrying,dead")]),
        ("error:TIMEOUT", [("error", "timeout")]),
        ('text:"no such \\"file\\""', [("text", 'no such "file"')]),
        ("text:C:\\temp", [("text", "C:\\temp")]),
        ("no such  file", [("", "no such file")]),
        ("no type:a such status:dead file", [("", "no such file"), ("type", "a"), ("status", "dead")]),
        ('"type:a"', [("", "type:a")]),
        ("key::x", [("key", ":x")]),
        (f"id:{ID.upper()} id:{OTHER},{ID}", [("id", f"{ID},{OTHER}")]),
        ("since:2h until:2026-11-16T10:30", [("since", "2h"), ("until", "2026-11-16T10:30")]),
        ('since:"2026-11-16 10:30:00 UTC"', [("since", "2026-11-16 10:30:00 UTC")]),
    ],
)
def test_queries_are_read(text: str, terms: list[tuple[str, str]]) -> None:
    assert [(str(term.name), term.value) for term in parse(text).terms] == terms


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("typ:a", "no term typ:"),
        ("http://x", "Put words with a colon in quotes"),
        ("type:", "type: needs a value"),
        ("type: a", "type: needs a value"),
        ('type:""', "type: needs a value"),
        ('""', "nothing between the quotes"),
        ('text:"no such', "A quote is not closed"),
        ('text:"no"such', "A quote is not closed"),
        ('type:"x', "A quote is not closed"),
        ("type:a type:b", "type: is given twice"),
        ("status:broken", "no status 'broken'"),
        ("status:,", "status: needs a value"),
        ("id:7", "'7' is not the id of a task"),
        ("error:oops", "no error code 'oops'"),
        ("since:tomorrow", "since: takes an age such as"),
        ("until:2h30m", "until: takes an age such as"),
        ("since:999999d", "since: takes an age such as"),
        ("since:0001-01-01T00:00+23:59", "since: takes an age such as"),
        ("a\x00b", "cannot be written"),
        ("a\ud800b", "cannot be written"),
        ("a" * (LONGEST + 1), "has 2,001 characters"),
        ('"' + '\\"' * 999 + '"' + " a", "has 2,002 characters"),
    ],
)
def test_a_query_that_cannot_be_used_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


def test_a_query_that_becomes_longer_when_it_is_written_is_refused_at_once() -> None:
    assert "are allowed" in refusal('a"' * 990 + " b")


def test_errors_belong_to_dead_and_retrying_tasks_unless_a_status_is_given() -> None:
    for term in ("error:timeout", "fingerprint:ab", "text:x"):
        assert parse(term).statuses == {TaskStatus.DEAD, TaskStatus.RETRYING}
        assert parse(f"{term} status:discarded").statuses == {TaskStatus.DISCARDED}
    assert parse("type:a").statuses == frozenset()


def test_a_term_can_be_replaced_and_removed() -> None:
    query = parse("type:a status:dead queue:q")
    assert str(query.without(Name.STATUS)) == "type:a queue:q"
    assert str(query.replacing(Name.STATUS, "queued")) == "type:a queue:q status:queued"
    assert query.replacing(Name.STATUS, None) == query.without(Name.STATUS)


def test_only_an_id_alone_is_an_id() -> None:
    assert only_id(f" {ID.upper()}\n") == uuid.UUID(ID)
    assert [only_id(each) for each in ("", "x", f"{ID} x", f"id:{ID}", ID.replace("-", ""), ID[:-1])] == [None] * 6


def test_times_are_utc_unless_they_say_otherwise_and_ages_count_back(stack: ServersOfTests) -> None:
    def times_of(text: str) -> tuple[datetime | None, datetime | None]:
        with engine().connect() as connection:
            found = filter_of(connection, parse(text), at=AT)
        return found.since, found.until

    hour = timedelta(hours=1)
    assert times_of("since:2h until:30m") == (AT - 2 * hour, AT - hour / 2)
    assert times_of("since:2026-11-16T08:00") == (AT - 2 * hour, None)
    assert times_of("since:2026-11-16T08:00+01:00") == (AT - 3 * hour, None)
    assert times_of('until:"2026-11-16 08:00:00 UTC"') == (None, AT - 2 * hour)
    assert times_of("since:2026-11-16") == (AT - 10 * hour, None)
    with pytest.raises(Misuse, match="no task can match"):
        times_of("since:1h until:2h")


def test_words_are_the_first_that_fits_of_status_type_ids_key_and_error_text(stack: ServersOfTests) -> None:
    submitted(1, key="order 7")
    submitted(1, key="demo.flaky.key")
    submitted(1, key="queued")
    assert understood("DEAD") == "status:dead"
    assert understood("completed type:a") == "status:succeeded type:a"
    assert understood("demo.flaky") == "type:demo.flaky"
    assert understood("demo.flaky.key") == "key:demo.flaky.key"
    assert understood("order 7 status:queued") == 'key:"order 7" status:queued'
    assert understood("queued") == "status:queued", "a status comes before a key"
    assert understood(f"{ID} status:dead") == f"id:{ID} status:dead"
    assert understood(f"{ID}, {OTHER.upper()}  {ID}") == f"id:{ID},{OTHER}"
    assert understood("no such file") == 'text:"no such file"'
    assert understood("type:a") == "type:a", "without words nothing is asked"


def test_words_have_a_second_meaning_if_the_first_is_given_already(stack: ServersOfTests) -> None:
    assert understood("dead status:queued") == "text:dead status:queued"
    assert understood("demo.flaky type:a") == "text:demo.flaky type:a"
    with pytest.raises(Misuse, match="text: is given already"):
        understood("dead status:queued text:x")


def test_a_query_that_is_too_long_with_a_name_is_refused(stack: ServersOfTests) -> None:
    assert len(str(parse("a" * LONGEST))) == LONGEST
    with pytest.raises(Misuse, match="2,005 characters"):
        understood("a" * LONGEST)


def test_a_key_is_narrowed_by_a_type_and_by_ids(stack: ServersOfTests) -> None:
    def ids(text: str) -> list[uuid.UUID]:
        with engine().connect() as connection:
            found = filter_of(connection, parse(text), at=AT).ids
            assert found is not None
            return list(found)

    (id_,) = submitted(1, key="order 7")
    assert ids('key:"order 7"') == ids('key:"order 7" type:demo.flaky') == ids(f'key:"order 7" id:{id_},{ID}') == [id_]
    assert ids('key:"order 7" type:mail.send') == ids(f'key:"order 7" id:{ID}') == ids("key:x") == []


def test_only_a_token_that_may_operate_searches_in_error_messages(stack: ServersOfTests) -> None:
    buried(1, error_message="password is hunter2")
    reader, operator = token_of(Scope.TASKS_READ_ALL), token_of(Scope.OPERATE)
    with engine().connect() as connection:
        hidden = understand(connection, parse("hunter2"))
    assert hidden.get(Name.TEXT) == "hunter2"
    for query in (parse("text:hunter2"), hidden, parse("status:dead text:h type:a")):
        require_visible(query, operator)
        with pytest.raises(Forbidden, match="lacks the scope operate"):
            require_visible(query, reader)
    require_visible(parse("status:dead error:timeout fingerprint:ab type:a"), reader)
