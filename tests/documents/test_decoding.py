"""Decoding bytes to text, and detecting the type of a file."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from documents.decoding import decode
from documents.file_types import Kind, detect_kind, normalize_media_type
from documents.unreadable import Unreadable
from tests.documents.files import read

GREETING = "Grüße aus Łódź, 東京 и Москвы"


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-mark", "utf-16-be-mark", "utf-32-le-mark", "utf-32-be-mark"]
)
def test_unicode_is_recognised_by_its_mark_and_utf_8_without_one(encoding: str) -> None:
    plain = encoding.removesuffix("-mark")
    mark = "\ufeff" if plain != encoding else ""
    assert decode((mark + GREETING).encode(plain)) == GREETING


def test_text_that_is_not_utf_8_is_decoded_as_western() -> None:
    assert decode("Größe: 5 € – „gut“".encode("cp1252")) == "Größe: 5 € – „gut“"
    assert decode(b"caf\xe9 \x81 " + b"x" * 200) == "café \x81 " + "x" * 200  # cp1252 does not define 0x81


@pytest.mark.parametrize("charset", ["windows-1251", "koi8-r", "utf-16-le"])
def test_a_declared_encoding_is_used(charset: str) -> None:
    assert read("Москва".encode(charset), media_type=f"Text/Plain; charset={charset}").text == "Москва"


@pytest.mark.parametrize("charset", ["zip", "rot13", "unicode_escape", "punycode", "no such", "\x00", "ü"])
def test_a_declared_encoding_that_is_not_a_text_encoding_is_ignored(charset: str) -> None:
    assert decode(b"plain \\u0041", charset) == "plain \\u0041"


def test_every_line_ending_becomes_a_newline() -> None:
    assert decode(b"a\r\nb\rc\n") == "a\nb\nc\n"


@pytest.mark.parametrize(
    "content",
    [
        b"text\0text",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"\x7fELF\x02\x01",
        os.urandom(5000).replace(b"\0", b"\1"),
        b"\x01\x02\x03",
    ],
    ids=["nul", "png", "elf", "random", "controls"],
)
def test_a_binary_file_is_rejected(content: bytes) -> None:
    with pytest.raises(Unreadable, match="not text"):
        read(content)


def test_a_mark_that_contradicts_the_content_is_rejected() -> None:
    with pytest.raises(Unreadable, match="begins with a UTF-16-LE mark but is not valid UTF-16-LE"):
        read(b"\xff\xfea")


def test_a_log_with_terminal_colours_is_accepted() -> None:
    assert "error" in read(b"\x1b[31merror\x1b[0m\n" * 50, "a.log").text


@given(st.binary(max_size=300), st.sampled_from([None, "utf-8", "utf-16", "gb18030", "iso2022_jp", "x"]))
def test_any_bytes_are_decoded_or_rejected(content: bytes, charset: str | None) -> None:
    with suppress(Unreadable):
        assert "\r" not in decode(content, charset)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_no_character_of_a_text_is_lost(text: str) -> None:
    if not text.startswith("\ufeff"):
        assert decode(text.encode()) == text


@pytest.mark.parametrize(
    ("name", "media_type", "content", "kind"),
    [
        ("a.txt", None, b"", Kind.TEXT),
        ("a.MD", None, b"", Kind.MARKDOWN),
        ("a.htm", "", b"", Kind.HTML),
        ("a", "text/html; charset=utf-8", b"", Kind.HTML),
        ("a.txt", "text/html", b"", Kind.HTML),
        ("a.pdf", "application/octet-stream", b"", Kind.PDF),
        ("a.txt", "text/plain", b"%PDF-1.7", Kind.PDF),
        ("a.unheard", "text/unheard", b"", Kind.TEXT),
        ("a.html", "no media type\r\nSet-Cookie: a=b", b"", Kind.HTML),
    ],
)
def test_the_first_bytes_count_most_then_the_media_type_then_the_name(
    name: str, media_type: str | None, content: bytes, kind: Kind
) -> None:
    stored = normalize_media_type(name, media_type)
    assert detect_kind(name, stored, content) is kind
    assert "\n" not in stored


@pytest.mark.parametrize(("name", "media_type"), [("a.zip", None), ("a", None), ("a.txt", "image/png"), ("", "a/b")])
def test_an_unsupported_type_is_rejected_with_a_list_of_the_supported_ones(name: str, media_type: str | None) -> None:
    with pytest.raises(Unreadable, match="use text, Markdown, HTML or PDF"):
        read(b"content", name, media_type)


@pytest.mark.parametrize("content", [b"", b" \n\t ", b"\xef\xbb\xbf"])
def test_a_file_without_text_is_rejected(content: bytes) -> None:
    with pytest.raises(Unreadable, match=r"empty|no text"):
        read(content)


def test_markdown_is_kept_as_it_is_written() -> None:
    written = "# Title\n\n* [link](a.md) `code` <!-- note -->\n"
    assert read(written.encode(), "a.md").text == written


def test_characters_that_postgresql_cannot_store_are_replaced() -> None:
    assert "\0" not in read(("a" * 200 + "\0").encode("utf-16")).text
