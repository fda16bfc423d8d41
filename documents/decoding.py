"""Bytes → text. A byte order mark decides, then what is declared, then UTF-8, and what is left is Western (cp1252).

No encoding is guessed from the letters: on a short text that is a lottery, and UTF-8 is hardly ever met by accident.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from documents.unreadable import Unreadable

# UTF-32 first: its mark begins with that of UTF-16
MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Python calls many things a codec (zip, idna, unicode_escape); these are letters of people
TRUSTED: Final = re.compile(
    r"utf-(8|16|32)|iso8859|iso2022|cp\d|koi8|gb|big5|euc_|shift_jis|mac-|ascii|tis-620|johab|hz"
)
CONTROL: Final = [chr(code) for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n\v\f\r\x08\x1b\x85"]
MOST_CONTROL: Final = 0.01  # a share: logs hold a few of them, programs and pictures many
BINARY: Final = "It is not text: it holds bytes that no text has."


def decoded(content: bytes, charset: str | None = None) -> str:
    """With every end of line as \\n. Binary files are `Unreadable`."""
    text = _decoded(content, _trusted(charset))
    if sum(map(text.count, CONTROL)) > MOST_CONTROL * len(text):
        raise Unreadable(BINARY)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(content: bytes, declared: str | None) -> str:
    for mark, encoding in MARKS:
        if content.startswith(mark):
            try:
                return content[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                raise Unreadable(f"It begins like {encoding.upper()} and goes on as something else.") from None
    if declared is None and b"\0" in content:
        raise Unreadable(BINARY)
    for encoding in filter(None, (declared, "utf-8", "cp1252")):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    return content.decode("latin-1")


def _trusted(charset: str | None) -> str | None:
    try:
        name = codecs.lookup(charset or "").name
    except (LookupError, ValueError):
        return None
    return name if TRUSTED.match(name) else None
