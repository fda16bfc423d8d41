"""Chunks: nothing is lost, none is too long, and borders are where a reader would put them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from documents.chunks import OVERLAP, SIZE, Chunk, chunks

TEXTS = st.lists(
    st.one_of(st.text(max_size=60), st.sampled_from(["\n\n", ". ", " ", "\n", "。", "x" * 90, "\r", "\u2028", "!) "])),
    max_size=60,
).map("".join)


def joined(pieces: list[Chunk]) -> str:
    return "".join(piece.text[piece.overlap :] for piece in pieces)


@given(TEXTS, st.integers(2, 120), st.integers(0, 150))
def test_chunks_without_their_overlaps_are_the_text(text: str, size: int, overlap: int) -> None:
    pieces = chunks(text, size=size, overlap=overlap)
    assert joined(pieces) == text
    for before, piece in zip([None, *pieces], pieces, strict=False):
        assert 0 < len(piece.text) - piece.overlap <= size
        assert piece.overlap <= overlap
        if before is None:
            assert piece.overlap == 0


@given(TEXTS, st.integers(2, 120), st.integers(0, 150))
def test_an_overlap_is_the_end_of_what_came_before(text: str, size: int, overlap: int) -> None:
    so_far = ""
    for piece in chunks(text, size=size, overlap=overlap):
        assert so_far.endswith(piece.text[: piece.overlap])
        so_far += piece.text[piece.overlap :]


def test_a_short_text_is_one_chunk_and_no_text_is_none() -> None:
    assert chunks("Hello.") == [Chunk("Hello.", 0)]
    assert chunks("") == []


def test_the_best_border_in_reach_is_taken() -> None:
    sentences = "A sentence. " * 30
    by_paragraph = chunks(f"{'word ' * 12}end.\n\n{sentences}", size=100, overlap=0)
    assert by_paragraph[0].text.endswith("end.\n\n")
    assert {piece.text[-2:] for piece in chunks(sentences, size=100, overlap=0)} == {". "}
    assert {piece.text[-1:] for piece in chunks("word " * 90, size=100, overlap=0)} == {" "}
    assert [len(piece.text) for piece in chunks("東" * 250, size=100, overlap=0)] == [100, 100, 50]


def test_a_sentence_on_a_border_is_whole_in_one_of_the_two() -> None:
    text = "".join(f"This is sentence number {n} of the story. " for n in range(200))
    pieces = chunks(text)
    assert len(pieces) > 5
    for n in range(200):
        assert any(f"This is sentence number {n} of the story." in piece.text for piece in pieces)


def test_an_overlap_begins_with_a_whole_word() -> None:
    for piece in chunks("something " * 1000)[1:]:
        assert piece.overlap
        assert piece.text.startswith("something ")


def test_a_long_text_takes_time_in_proportion_to_its_length() -> None:
    started_at = time.monotonic()
    for text in ("\n \n" * 700_000, "a" * 2_000_000, ". " * 1_000_000, " " * 2_000_000):
        assert len(chunks(text)) >= len(text) // SIZE
    assert time.monotonic() - started_at < 10
    assert OVERLAP < SIZE
