"""Decode bytes to text: by the byte order mark, else the declared encoding, else UTF-8, else cp1252 (Western).

The encoding is never guessed from letter statistics, which are unreliable for short texts. Text in another encoding is
hardly ever valid UTF-8 by accident.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from documents.unreadable import Unreadable

# UTF-32 before UTF-16, because the mark of UTF-32-LE begins with that of UTF-16-LE
MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Python's codecs include much that is not a text encoding (zip, idna, unicode_escape); allow only these.
ALLOWED: Final = re.compile(
    r"utf-(8|16|32)|iso8859|iso2022|cp\d|koi8|gb|big5|euc_|shift_jis|mac-|ascii|tis-620|johab|hz"
)
CONTROL: Final = [chr(code) for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n\v\f\r\x08\x1b\x85"]
MAX_CONTROL_SHARE: Final = 0.01  # logs contain a few control characters, programs and pictures many
NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")  # characters that PostgreSQL cannot store
BINARY: Final = "The file is binary, not text."


def decode(content: bytes, charset: str | None = None) -> str:
    """Return the text with every line ending as \\n. Binary content raises `Unreadable`."""
    text = _decode(content, _allowed_encoding(charset))
    if sum(map(text.count, CONTROL)) > MAX_CONTROL_SHARE * len(text):
        raise Unreadable(BINARY)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decode(content: bytes, declared: str | None) -> str:
    for mark, encoding in MARKS:
        if content.startswith(mark):
            try:
                return content[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                label = encoding.upper()
                raise Unreadable(f"The file begins with a {label} mark but is not valid {label}.") from None
    if declared is None and b"\0" in content:
        raise Unreadable(BINARY)
    for encoding in filter(None, (declared, "utf-8", "cp1252")):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    return content.decode("latin-1")


def _allowed_encoding(charset: str | None) -> str | None:
    try:
        name = codecs.lookup(charset or "").name
    except (LookupError, ValueError):
        return None
    return name if ALLOWED.match(name) else None
