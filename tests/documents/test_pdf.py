"""PDF: its text by pages; broken, locked and hostile ones are a sentence and no memory."""

from __future__ import annotations

import zlib

import pytest

from documents.unreadable import Unreadable
from tests.documents.files import MIB, SENTENCE, TEXT_STREAM, bomb, pdf, raw_pdf, read

GOOD = pdf("Hello reader.")
HELLO = zlib.compress(TEXT_STREAM)


def test_a_pdf_is_read_page_by_page() -> None:
    found = read(pdf("Hello reader.", "Second page, café."), "a.pdf")
    assert (found.text, found.pages) == ("Hello reader.\n\nSecond page, café.", 2)


def test_one_that_was_written_by_hand_is_read_too() -> None:
    assert read(raw_pdf(HELLO), "a.pdf").text == "hello"


def test_a_hundred_pages_are_read_in_little_memory() -> None:
    found = read(pdf(*(f"Page {n}. {SENTENCE * 20}" for n in range(100))), "a.pdf", memory_bytes=192 * MIB)
    assert found.pages == 100
    assert found.text.count("Page ") == 100
    assert "Page 99." in found.text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty"),
        (b"hello", "broken"),
        (b"%PDF-1.7\n", "broken"),
        (GOOD[: len(GOOD) // 2], "broken"),
        (raw_pdf(HELLO, kids=b"2 0 R"), "broken"),
        (raw_pdf(b"not packed at all"), "broken|no text"),
        (b"%PDF-1.4\n1 0 obj" + b"[" * 1_000_000, "broken|nested"),
        (pdf(""), "no text in it. Is it a scan"),
        (pdf("Secret.", password="a password"), "encrypted"),
        (raw_pdf(HELLO, kids=b"3 0 R " * 6000, count=6000), "6,000 pages, and 5,000 is the most"),
    ],
    ids=["empty", "no pdf", "head", "half", "loop", "not packed", "nested", "blank", "locked", "pages"],
)
def test_a_bad_pdf_is_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(Unreadable, match=sentence) as refused:
        read(content, "a.pdf")
    assert str(refused.value).endswith((".", "?"))
    assert "\n" not in str(refused.value)


def test_a_pdf_that_everybody_may_open_is_read_although_it_is_encrypted() -> None:
    assert read(pdf("Not so secret.", password=""), "a.pdf").text == "Not so secret."


@pytest.mark.guarantee
@pytest.mark.parametrize(("times", "size"), [(1, 300 * MIB), (2, 300 * MIB)])
def test_a_bomb_is_refused_before_it_has_unpacked(times: int, size: int) -> None:
    """In 256 MiB of address space, Python and pypdf included: it never held what it would unpack to."""
    content = raw_pdf(bomb(size, times=times), filters=b"/FlateDecode" * times)
    assert len(content) < 2 * MIB
    with pytest.raises(Unreadable, match="unpacks into far more than it should"):
        read(content, "a.pdf", memory_bytes=256 * MIB)


def test_a_page_that_unpacks_within_limits_into_endless_work_is_refused() -> None:
    content = raw_pdf(zlib.compress(b"BT /F 1 Tf (a) Tj ET\n" * 3_000_000))
    with pytest.raises(Unreadable, match=r"processor time|memory|far more than it should"):
        read(content, "a.pdf", cpu_seconds=1)


def test_pages_that_repeat_the_same_text_without_end_are_refused() -> None:
    page = zlib.compress(b"BT /F 1 Tf (" + b"word " * 2000 + b") Tj ET")
    with pytest.raises(Unreadable, match="more than 50,000 characters"):
        read(raw_pdf(page, kids=b"3 0 R " * 1000, count=1000), "a.pdf", most=50_000)
