"""Detect the type of a file: its first bytes count most, then the media type that was sent with it, then its name."""

from __future__ import annotations

import re
from email.message import Message
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final

from documents.unreadable import Unreadable


class Kind(StrEnum):
    """A supported type of file."""

    TEXT = "text"
    MARKDOWN = "Markdown"
    HTML = "HTML"
    PDF = "PDF"


SUFFIXES: Final = {
    **dict.fromkeys((".txt", ".text", ".log", ".rst", ".adoc", ".org", ".csv", ".tsv"), "text/plain"),
    **dict.fromkeys((".md", ".markdown", ".mdown"), "text/markdown"),
    **dict.fromkeys((".html", ".htm"), "text/html"),
    ".xhtml": "application/xhtml+xml",
    ".pdf": "application/pdf",
}
UNKNOWN: Final = "application/octet-stream"  # sent by clients that do not know the type
PDF_START: Final = b"%PDF-"
_KINDS: Final = {
    "text/markdown": Kind.MARKDOWN,
    "text/x-markdown": Kind.MARKDOWN,
    "text/html": Kind.HTML,
    "application/xhtml+xml": Kind.HTML,
    "application/pdf": Kind.PDF,
}
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+")


def normalize_media_type(name: str, given: str | None) -> str:
    """Return the media type to store: lower case, with its charset if one was given; else the type of the suffix."""
    message = Message()
    message["Content-Type"] = " ".join((given or "").split())[:200]
    plain = (given or "").partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(plain) or plain == UNKNOWN:
        return SUFFIXES.get(suffix_of(name), UNKNOWN)
    charset = message.get_content_charset()
    return f"{plain}; charset={charset}" if charset and charset.isascii() else plain


def detect_kind(name: str, media_type: str, content: bytes) -> Kind:
    """Return the type of a file, or raise `Unreadable` if it is not supported."""
    plain = media_type.partition(";")[0]
    if content.startswith(PDF_START):
        return Kind.PDF
    if plain in _KINDS:
        return _KINDS[plain]
    if plain.startswith("text/"):
        return Kind.TEXT
    files = f"{suffix_of(name)} files" if suffix_of(name) else "such files"
    raise Unreadable(f"The file is {media_type}, and {files} are not supported; use text, Markdown, HTML or PDF.")


def charset_of(media_type: str) -> str | None:
    return media_type.partition("; charset=")[2] or None


def suffix_of(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
