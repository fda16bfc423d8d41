"""PDF: extract the text page by page; reject broken, encrypted and hostile files with a clear message."""

from __future__ import annotations

import zlib

import pytest

from documents.unreadable import Unreadable
from tests.documents.files import MIB, SENTENCE, TEXT_STREAM, make_bomb, make_pdf, make_raw_pdf, read

GOOD = make_pdf("Hello reader.")
HELLO = zlib.compress(TEXT_STREAM)


def test_a_pdf_is_read_page_by_page() -> None:
    found = read(make_pdf("Hello reader.", "Second page, café."), "a.pdf")
    assert (found.text, found.pages) == ("Hello reader.\n\nSecond page, café.", 2)


def test_a_minimal_pdf_is_read() -> None:
    assert read(make_raw_pdf(HELLO), "a.pdf").text == "hello"


def test_a_hundred_pages_need_little_memory() -> None:
    found = read(make_pdf(*(f"Page {n}. {SENTENCE * 20}" for n in range(100))), "a.pdf", memory_bytes=192 * MIB)
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
        (make_raw_pdf(HELLO, kids=b"2 0 R"), "broken"),
        (make_raw_pdf(b"not packed at all"), "broken|no text"),
        (b"%PDF-1.4\n1 0 obj" + b"[" * 1_000_000, "broken|nested"),
        (make_pdf(""), "no text. Is it a scan"),
        (make_pdf("Secret.", password="a password"), "encrypted"),
        (make_raw_pdf(HELLO, kids=b"3 0 R " * 6000, count=6000), "6,000 pages; the limit is 5,000"),
    ],
    ids=["empty", "not a pdf", "head", "half", "loop", "not packed", "nested", "blank", "encrypted", "pages"],
)
def test_a_bad_pdf_is_rejected_with_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(Unreadable, match=sentence) as refused:
        read(content, "a.pdf")
    assert str(refused.value).endswith((".", "?"))
    assert "\n" not in str(refused.value)


def test_an_encrypted_pdf_with_an_empty_password_is_read() -> None:
    assert read(make_pdf("Not so secret.", password=""), "a.pdf").text == "Not so secret."


@pytest.mark.guarantee
@pytest.mark.parametrize(("times", "size"), [(1, 300 * MIB), (2, 300 * MIB)])
def test_a_decompression_bomb_is_rejected_before_it_is_unpacked(times: int, size: int) -> None:
    """256 MiB of address space are enough, so the unpacked content was never in memory."""
    content = make_raw_pdf(make_bomb(size, times=times), filters=b"/FlateDecode" * times)
    assert len(content) < 2 * MIB
    with pytest.raises(Unreadable, match="would unpack into far too much data"):
        read(content, "a.pdf", memory_bytes=256 * MIB)


def test_a_page_that_takes_too_long_to_parse_is_rejected() -> None:
    content = make_raw_pdf(zlib.compress(b"BT /F 1 Tf (a) Tj ET\n" * 3_000_000))
    with pytest.raises(Unreadable, match=r"processor time|memory|far too much data"):
        read(content, "a.pdf", cpu_seconds=1)


def test_pages_that_repeat_the_same_text_too_often_are_rejected() -> None:
    page = zlib.compress(b"BT /F 1 Tf (" + b"word " * 2000 + b") Tj ET")
    with pytest.raises(Unreadable, match="more than 50,000 characters"):
        read(make_raw_pdf(page, kids=b"3 0 R " * 1000, count=1000), "a.pdf", max_characters=50_000)
