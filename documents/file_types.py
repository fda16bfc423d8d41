"""What kind of file it is: its first bytes are believed first, then the media type that came with it, then its name."""

from __future__ import annotations

import re
from email.message import Message
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final

from documents.unreadable import Unreadable


class Kind(StrEnum):
    """A kind of file that is understood."""

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
UNKNOWN: Final = "application/octet-stream"  # what a client says that does not know
PDF_BEGINS: Final = b"%PDF-"
_KINDS: Final = {
    "text/markdown": Kind.MARKDOWN,
    "text/x-markdown": Kind.MARKDOWN,
    "text/html": Kind.HTML,
    "application/xhtml+xml": Kind.HTML,
    "application/pdf": Kind.PDF,
}
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+")


def media_type_of(name: str, given: str | None) -> str:
    """As it is stored: in small letters, with its charset if one was given; of the name if nothing useful was."""
    message = Message()
    message["Content-Type"] = " ".join((given or "").split())[:200]
    plain = (given or "").partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(plain) or plain == UNKNOWN:
        return SUFFIXES.get(suffix(name), UNKNOWN)
    charset = message.get_content_charset()
    return f"{plain}; charset={charset}" if charset and charset.isascii() else plain


def kind_of(name: str, media_type: str, content: bytes) -> Kind:
    """`Unreadable` if it is none of ours."""
    plain = media_type.partition(";")[0]
    if content.startswith(PDF_BEGINS):
        return Kind.PDF
    if plain in _KINDS:
        return _KINDS[plain]
    if plain.startswith("text/"):
        return Kind.TEXT
    what = f"files that end in {suffix(name)}" if suffix(name) else "files of this kind"
    raise Unreadable(f"It is {media_type}, and {what} are not understood: text, Markdown, HTML and PDF are.")


def charset_of(media_type: str) -> str | None:
    return media_type.partition("; charset=")[2] or None


def suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
