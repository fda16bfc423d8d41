"""Chunks: no text is lost, no chunk is too long, and chunks end where a reader would end them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from documents.chunks import OVERLAP, SIZE, Chunk, split

TEXTS = st.lists(
    st.one_of(st.text(max_size=60), st.sampled_from(["\n\n", ". ", " ", "\n", "。", "x" * 90, "\r", "\u2028", "!) "])),
    max_size=60,
).map("".join)


def join(chunks: list[Chunk]) -> str:
    return "".join(chunk.text[chunk.overlap :] for chunk in chunks)


@given(TEXTS, st.integers(2, 120), st.integers(0, 150))
def test_no_text_is_lost_between_chunks(text: str, size: int, overlap: int) -> None:
    chunks = split(text, size=size, overlap=overlap)
    assert join(chunks) == text
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert 0 < len(chunk.text) - chunk.overlap <= size
        assert chunk.overlap <= overlap
        if before is None:
            assert chunk.overlap == 0


@given(TEXTS, st.integers(2, 120), st.integers(0, 150))
def test_an_overlap_repeats_the_end_of_the_previous_chunk(text: str, size: int, overlap: int) -> None:
    so_far = ""
    for chunk in split(text, size=size, overlap=overlap):
        assert so_far.endswith(chunk.text[: chunk.overlap])
        so_far += chunk.text[chunk.overlap :]


def test_a_short_text_is_one_chunk_and_an_empty_text_has_none() -> None:
    assert split("Hello.") == [Chunk("Hello.", 0)]
    assert split("") == []


def test_a_chunk_ends_at_the_best_border_in_reach() -> None:
    sentences = "A sentence. " * 30
    by_paragraph = split(f"{'word ' * 12}end.\n\n{sentences}", size=100, overlap=0)
    assert by_paragraph[0].text.endswith("end.\n\n")
    assert {chunk.text[-2:] for chunk in split(sentences, size=100, overlap=0)} == {". "}
    assert {chunk.text[-1:] for chunk in split("word " * 90, size=100, overlap=0)} == {" "}
    assert [len(chunk.text) for chunk in split("東" * 250, size=100, overlap=0)] == [100, 100, 50]


def test_a_sentence_on_a_border_is_whole_in_one_of_the_two_chunks() -> None:
    text = "".join(f"This is sentence number {n} of the story. " for n in range(200))
    chunks = split(text)
    assert len(chunks) > 5
    for n in range(200):
        assert any(f"This is sentence number {n} of the story." in chunk.text for chunk in chunks)


def test_an_overlap_begins_with_a_whole_word() -> None:
    for chunk in split("something " * 1000)[1:]:
        assert chunk.overlap
        assert chunk.text.startswith("something ")


def test_splitting_takes_linear_time() -> None:
    started_at = time.monotonic()
    for text in ("\n \n" * 700_000, "a" * 2_000_000, ". " * 1_000_000, " " * 2_000_000):
        assert len(split(text)) >= len(text) // SIZE
    assert time.monotonic() - started_at < 10
    assert OVERLAP < SIZE
