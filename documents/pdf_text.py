"""PDF → text, page by page. Only what the file says in letters: pictures of text (scans) are not read."""

from __future__ import annotations

import io

import pypdf
from pypdf.errors import DependencyError, LimitReachedError

from documents.unreadable import Extracted, TooMuchText, Unreadable

ENCRYPTED = "The PDF is encrypted, and only whoever has its password can read it."
BOMB = "The PDF unpacks into far more than it should."


def read_pdf(content: bytes, *, most: int, most_pages: int) -> Extracted:
    try:
        return _read(content, most, most_pages)
    except (Unreadable, MemoryError):
        raise
    except LimitReachedError:
        raise Unreadable(BOMB) from None
    except RecursionError:
        raise Unreadable("The PDF is nested too deeply.") from None
    except Exception as error:  # pypdf lets anything through that a broken file can cause
        raise Unreadable(f"The PDF is broken: {_first_line(error)}.") from None


def _read(content: bytes, most: int, most_pages: int) -> Extracted:
    reader = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted:
        _open(reader)
    count = len(reader.pages)
    if count > most_pages:
        raise Unreadable(f"The PDF has {count:,} pages, and {most_pages:,} is the most.")
    texts: list[str] = []
    length = 0
    for page in reader.pages:
        text = page.extract_text().strip()
        length += len(text) + 2
        if length > most:
            raise TooMuchText(most)
        texts.append(text)
    return Extracted("\n\n".join(filter(None, texts)), pages=count)


def _open(reader: pypdf.PdfReader) -> None:
    """Many are encrypted with an empty password: everybody may read them, and not print."""
    try:
        if reader.decrypt(""):
            return
    except DependencyError:
        pass  # AES: without another package nobody can say whether the password is empty
    raise Unreadable(ENCRYPTED)


def _first_line(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0][:200].rstrip(".")
    return said or type(error).__name__
