"""Files for tests: good ones, broken ones, hostile ones."""

from __future__ import annotations

import zlib
from typing import Any

from fpdf import FPDF

from documents.extract import extract
from documents.file_types import normalize_media_type
from documents.unreadable import Extracted

MIB = 1 << 20
SENTENCE = "The lease of a worker runs out. "
TEXT_STREAM = b"BT /F 9 Tf (hello) Tj ET"


def read(content: bytes, name: str = "a.txt", media_type: str | None = None, **limits: int) -> Extracted:
    options: dict[str, Any] = {"max_characters": 20 * MIB, "max_pages": 5000, "cpu_seconds": 60, **limits}
    return extract(content, name=name, media_type=normalize_media_type(name, media_type), **options)


def make_pdf(*pages: str, password: str | None = None) -> bytes:
    """Return a PDF with one page per text."""
    document = FPDF()
    document.set_font("helvetica")
    if password is not None:
        document.set_encryption(owner_password="the owner's", user_password=password)
    for page in pages:
        document.add_page()
        document.multi_cell(0, text=page)
    return bytes(document.output())


def make_raw_pdf(
    stream: bytes, *, filters: bytes = b"/FlateDecode", kids: bytes = b"3 0 R", count: int = 1, page: bytes = b""
) -> bytes:
    """Return a PDF that no library would write. The page is object 3, its content is object 4."""
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, count),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>%s>>" % page,
        b"<</Filter[%s]/Length %d>>stream\n%s\nendstream" % (filters, len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    written, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    return written + end % (table, len(written))


def make_bomb(size: int, *, times: int = 1) -> bytes:
    """Return a few bytes that unpack into `size` bytes, without ever holding those in memory."""
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(b" " * MIB) for _ in range(size // MIB)) + packer.flush()
    for _ in range(times - 1):
        packed = zlib.compress(packed)
    return packed
