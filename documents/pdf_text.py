"""Extract the text of a PDF, page by page. Text in pictures (scans) is not recognised."""

from __future__ import annotations

import io

import pypdf
from pypdf.errors import DependencyError, LimitReachedError

from documents.unreadable import Extracted, TooMuchText, Unreadable

ENCRYPTED = "The PDF is encrypted; upload a copy without a password."
BOMB = "The PDF is compressed so strongly that it would unpack into far too much data."


def read_pdf(content: bytes, *, max_characters: int, max_pages: int) -> Extracted:
    try:
        return _read(content, max_characters, max_pages)
    except (Unreadable, MemoryError):
        raise
    except LimitReachedError:
        raise Unreadable(BOMB) from None
    except RecursionError:
        raise Unreadable("The PDF is nested too deeply.") from None
    except Exception as error:  # a broken file can make pypdf raise anything
        raise Unreadable(f"The PDF is broken: {_first_line(error)}.") from None


def _read(content: bytes, max_characters: int, max_pages: int) -> Extracted:
    reader = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted:
        _decrypt(reader)
    count = len(reader.pages)
    if count > max_pages:
        raise Unreadable(f"The PDF has {count:,} pages; the limit is {max_pages:,} (DOCUMENT_MAX_PAGES).")
    texts: list[str] = []
    length = 0
    for page in reader.pages:
        text = page.extract_text().strip()
        length += len(text) + 2
        if length > max_characters:
            raise TooMuchText(max_characters)
        texts.append(text)
    return Extracted("\n\n".join(filter(None, texts)), pages=count)


def _decrypt(reader: pypdf.PdfReader) -> None:
    """Try the empty password: many PDFs are encrypted with it, to forbid printing but not reading."""
    try:
        if reader.decrypt(""):
            return
    except DependencyError:
        pass  # AES needs another package, so the empty password cannot be tried
    raise Unreadable(ENCRYPTED)


def _first_line(error: Exception) -> str:
    message = str(error).strip().partition("\n")[0][:200].rstrip(".")
    return message or type(error).__name__
