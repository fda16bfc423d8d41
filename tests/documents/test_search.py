"""Searching: the best first, with what was found marked; and nothing that somebody types is an error."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from documents.search import SEARCH
from models.engine import engine
from models.sql import sql
from tests.documents.ledger import found, names, searchable
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar


@pytest.fixture(autouse=True)
def ledger(stack: ServersOfTests) -> None:
    searchable("The lease of a worker runs out. " + "Nothing else is said here. " * 20, "leases.md")
    searchable("A lease, a lease, a lease: the token of the lease decides.", "tokens.md")
    searchable("Brokers wake-up the bell. A token is random.", "brokers.md")


def test_a_hit_says_where_it_is_how_good_it_is_and_what_was_found() -> None:
    (hit,) = found("brokers")
    assert (hit.name, hit.position) == ("brokers.md", 0)
    assert isinstance(hit.document_id, uuid.UUID)
    assert 0 < hit.rank < 1
    assert hit.highlight == "⟦Brokers⟧ wake-up the bell. A token is random"


def test_all_words_are_wanted_and_more_of_them_near_each_other_are_better() -> None:
    assert names("lease") == ["tokens.md", "leases.md"]
    assert names("LEASE token") == ["tokens.md"]
    assert names("lease or bell")[0] == "tokens.md"
    assert sorted(names("lease or bell")) == ["brokers.md", "leases.md", "tokens.md"]
    assert names('"wake-up the bell"') == ["brokers.md"]
    assert names('"bell the wake-up"') == []
    assert names("token -lease") == ["brokers.md"]


def test_only_as_many_as_wanted_and_never_more_than_a_hundred() -> None:
    assert len(found("lease", limit=1)) == 1
    assert len(found("lease", limit=-5)) == 1
    assert len(found("lease", limit=10**30)) == 2


def test_a_place_deep_in_a_document_is_found_with_its_position() -> None:
    searchable("Filler words here. " * 400 + "The needle is there. " + "More filler words. " * 400, "deep.txt")
    (hit, *more) = found("needle")
    assert hit.position > 2
    assert "⟦needle⟧" in hit.highlight
    assert len(hit.highlight) < 600
    assert len(more) <= 1  # in the overlap


def test_brackets_of_a_document_are_no_highlights_and_markup_stays_text() -> None:
    searchable("⟦fake⟧ [bold]needle[/bold] <script>alert(1)</script>", "odd.txt")
    (hit,) = found("needle")
    assert hit.highlight.count("⟦") == 1
    assert "[bold]⟦needle⟧[/bold" in hit.highlight


def test_words_of_any_language_are_found() -> None:
    for words in ("straße", "東京", "Москва", "naïve", "foo_bar", "x-y-z", "a@b.example", "3.14"):
        searchable(f"before {words} after", "any.txt")
        assert names(words) == ["any.txt"]


def test_nothing_that_somebody_types_is_an_error() -> None:
    typed = (
        "", " ", "'", '"', "&", "|", "!", "(", ":*", "-", "--", "or", "or or", '"unclosed', "\\", "a & | b", "<->", "%",
        "%s", "'; DROP TABLE document; --", "lease' OR '1'='1", "\0", "lease\0", "\ud800", "x" * 100_000,
        "word " * 10_000, "-lease", "🌱", "{}", "$1", ":words", "NULL", "((((((((((", '"' * 999,
    )  # fmt: skip
    for words in typed:
        assert len(found(words)) <= 3
    assert scalar("SELECT count(*) FROM ledger.document") == 3


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.text(alphabet=st.characters(), max_size=80) | st.text(alphabet="a\"' -!&|():*<>\\or", max_size=40))
def test_nothing_at_all_is(words: str) -> None:
    assert len(found(words)) <= 10


def test_words_are_looked_up_in_their_index() -> None:
    with engine().begin() as connection:
        connection.execute(sql("SET LOCAL enable_seqscan = off"))
        plan = connection.execute(sql(f"EXPLAIN {SEARCH}"), {"words": "lease", "limit": 10}).scalars()
        assert "ix_document_chunk_words" in "".join(plan)
