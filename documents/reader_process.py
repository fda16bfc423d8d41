"""A program: reads one HTML or PDF file from stdin and writes its text to stdout as JSON, with little memory and time.

`documents/extract.py` starts it. What a hostile file does to a parser, it does to this process, which has no
connection, no secret and no file. It is run by its path, and `tasks` is there as a mere folder: the package itself
would load Celery and SQLAlchemy for a second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    how = json.loads(sys.argv[1])
    limit(resource.RLIMIT_AS, how["memoryBytes"])
    limit(resource.RLIMIT_CPU, how["cpuSeconds"], then=5)  # SIGXCPU says why it ended, the SIGKILL after it would not
    limit(resource.RLIMIT_FSIZE, 0)  # it has no file to write
    limit(resource.RLIMIT_CORE, 0)
    logging.disable()  # pypdf complains of every oddity
    sys.stdout.write(answer(sys.stdin.buffer.read(), how))


def answer(content: bytes, how: Mapping[str, Any]) -> str:
    """The text, or why there is none and never will be."""
    from documents.unreadable import Unreadable  # noqa: PLC0415 - found only as a mere folder

    try:
        return json.dumps(read(content, how))
    except Unreadable as refused:
        return json.dumps({"refused": str(refused)})
    except MemoryError:
        pass  # what held the memory goes with the traceback
    return json.dumps({"refused": f"It needs more than {how['memoryBytes'] >> 20:,} MiB of memory to be read."})


def read(content: bytes, how: Mapping[str, Any]) -> dict[str, Any]:
    if how["kind"] == "PDF":
        from documents.pdf_text import read_pdf  # noqa: PLC0415 - a page of HTML needs no pypdf

        found = read_pdf(content, most=how["most"], most_pages=how["mostPages"])
    else:
        from documents.html_text import read_html  # noqa: PLC0415

        found = read_html(content, charset=how["charset"], most=how["most"])
    return {"text": found.text, "pages": found.pages}


def limit(what: int, most: int, *, then: int = 0) -> None:
    """`then`: so much later without mercy."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system does not know this one
        resource.setrlimit(what, (most, most + then))


def as_mere_folders(*names: str) -> None:
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(__file__).resolve().parents[1].joinpath(*name.split(".")))]
        sys.modules[name] = module


if __name__ == "__main__":
    as_mere_folders("documents")
    main()
