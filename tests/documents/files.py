"""Files as tests need them: good ones, broken ones, hostile ones, and how they are read."""

from __future__ import annotations

import zlib
from typing import Any

from fpdf import FPDF

from documents.extract import extract
from documents.file_types import media_type_of
from documents.unreadable import Extracted

MIB = 1 << 20
SENTENCE = "The lease of a worker runs out. "
TEXT_STREAM = b"BT /F 9 Tf (hello) Tj ET"


def read(content: bytes, name: str = "a.txt", media_type: str | None = None, **limits: int) -> Extracted:
    how: dict[str, Any] = {"most": 20 * MIB, "most_pages": 5000, "cpu_seconds": 60, **limits}
    return extract(content, name=name, media_type=media_type_of(name, media_type), **how)


def pdf(*pages: str, password: str | None = None) -> bytes:
    """A page for each text."""
    made = FPDF()
    made.set_font("helvetica")
    if password is not None:
        made.set_encryption(owner_password="the owner's", user_password=password)
    for page in pages:
        made.add_page()
        made.multi_cell(0, text=page)
    return bytes(made.output())


def raw_pdf(
    stream: bytes, *, filters: bytes = b"/FlateDecode", kids: bytes = b"3 0 R", count: int = 1, page: bytes = b""
) -> bytes:
    """By hand, as no library would write it. The page is object 3, what it shows is object 4."""
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


def bomb(size: int, *, times: int = 1) -> bytes:
    """A few bytes that unpack into many, made without ever holding them."""
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(b" " * MIB) for _ in range(size // MIB)) + packer.flush()
    for _ in range(times - 1):
        packed = zlib.compress(packed)
    return packed
