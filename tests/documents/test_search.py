"""Search: the best matches come first and are highlighted, and no input is an error."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from documents.search import SEARCH
from models.engine import engine
from models.sql import sql
from tests.documents.ledger import add_searchable, search, search_names
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar


@pytest.fixture(autouse=True)
def searchable_documents(stack: ServersOfTests) -> None:
    add_searchable("The lease of a worker runs out. " + "Nothing else is said here. " * 20, "leases.md")
    add_searchable("A lease, a lease, a lease: the token of the lease decides.", "tokens.md")
    add_searchable("Brokers carry the mail. A token is random.", "brokers.md")


def test_a_hit_has_a_place_a_rank_and_a_highlight() -> None:
    (hit,) = search("brokers")
    assert (hit.name, hit.position) == ("brokers.md", 0)
    assert isinstance(hit.document_id, uuid.UUID)
    assert 0 < hit.rank < 1
    assert hit.highlight == "⟦Brokers⟧ carry the mail. A token is random"


def test_all_words_must_occur_and_chunks_with_more_of_them_rank_higher() -> None:
    assert search_names("lease") == ["tokens.md", "leases.md"]
    assert search_names("LEASE token") == ["tokens.md"]
    assert search_names("lease or mail")[0] == "tokens.md"
    assert sorted(search_names("lease or mail")) == ["brokers.md", "leases.md", "tokens.md"]
    assert search_names('"carry the mail"') == ["brokers.md"]
    assert search_names('"mail the carry"') == []
    assert search_names("token -lease") == ["brokers.md"]


def test_the_number_of_hits_is_limited() -> None:
    assert len(search("lease", limit=1)) == 1
    assert len(search("lease", limit=-5)) == 1
    assert len(search("lease", limit=10**30)) == 2


def test_a_word_deep_in_a_document_is_found_with_its_position() -> None:
    add_searchable("Filler words here. " * 400 + "The needle is there. " + "More filler words. " * 400, "deep.txt")
    (hit, *more) = search("needle")
    assert hit.position > 2
    assert "⟦needle⟧" in hit.highlight
    assert len(hit.highlight) < 600
    assert len(more) <= 1  # in the overlap


def test_a_document_cannot_fake_highlights_and_its_markup_stays_text() -> None:
    add_searchable("⟦fake⟧ [bold]needle[/bold] <script>alert(1)</script>", "odd.txt")
    (hit,) = search("needle")
    assert hit.highlight.count("⟦") == 1
    assert "[bold]⟦needle⟧[/bold" in hit.highlight


def test_words_of_any_language_are_found() -> None:
    for words in ("straße", "東京", "Москва", "naïve", "foo_bar", "x-y-z", "a@b.example", "3.14"):
        add_searchable(f"before {words} after", "any.txt")
        assert search_names(words) == ["any.txt"]


def test_no_input_is_an_error() -> None:
    typed = (
        "", " ", "'", '"', "&", "|", "!", "(", ":*", "-", "--", "or", "or or", '"unclosed', "\\", "a & | b", "<->", "%",
        "%s", "'; DROP TABLE document; --", "lease' OR '1'='1", "\0", "lease\0", "\ud800", "x" * 100_000,
        "word " * 10_000, "-lease", "🌱", "{}", "$1", ":words", "NULL", "((((((((((", '"' * 999,
    )  # fmt: skip
    for words in typed:
        assert len(search(words)) <= 3
    assert scalar("SELECT count(*) FROM ledger.document") == 3


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.text(alphabet=st.characters(), max_size=80) | st.text(alphabet="a\"' -!&|():*<>\\or", max_size=40))
def test_no_random_input_is_an_error(words: str) -> None:
    assert len(search(words)) <= 10


def test_a_search_uses_the_index_of_words() -> None:
    with engine().begin() as connection:
        connection.execute(sql("SET LOCAL enable_seqscan = off"))
        for visible_to in (None, "ci"):
            values = {"words": "lease", "limit": 10, "visible_to": visible_to}
            plan = connection.execute(sql(f"EXPLAIN {SEARCH}"), values).scalars()
            assert "ix_document_chunk_words" in "".join(plan)
