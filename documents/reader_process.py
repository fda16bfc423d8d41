"""A program that reads one HTML or PDF file from stdin and writes its text to stdout as JSON, within limits.

`documents/extract.py` starts it. A hostile file can only harm this process, which has no connection, no secret and no
open file. It is run by its path, and registers `documents` as a package without running its `__init__.py`, which would
load Celery and SQLAlchemy and take a second.
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
    options = json.loads(sys.argv[1])
    set_limit(resource.RLIMIT_AS, options["memoryBytes"])
    set_limit(resource.RLIMIT_CPU, options["cpuSeconds"], grace=5)  # SIGXCPU first, which names the cause, then SIGKILL
    set_limit(resource.RLIMIT_FSIZE, 0)  # it writes no file
    set_limit(resource.RLIMIT_CORE, 0)
    logging.disable()  # pypdf warns of every oddity
    sys.stdout.write(read_as_json(sys.stdin.buffer.read(), options))


def read_as_json(content: bytes, options: Mapping[str, Any]) -> str:
    """Return the text, or the reason why the file can never be read."""
    from documents.unreadable import Unreadable  # noqa: PLC0415 - importable only after register_package

    try:
        return json.dumps(read(content, options))
    except Unreadable as error:
        return json.dumps({"unreadable": str(error)})
    except MemoryError:
        pass  # leaving the block drops the traceback, and with it the memory
    limit = f"{options['memoryBytes'] >> 20:,} MiB"
    return json.dumps({"unreadable": f"Reading the file takes more than {limit} of memory."})


def read(content: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    max_characters = options["maxCharacters"]
    if options["kind"] == "PDF":
        from documents.pdf_text import read_pdf  # noqa: PLC0415 - HTML does not need pypdf

        extracted = read_pdf(content, max_characters=max_characters, max_pages=options["maxPages"])
    else:
        from documents.html_text import read_html  # noqa: PLC0415

        extracted = read_html(content, charset=options["charset"], max_characters=max_characters)
    return {"text": extracted.text, "pages": extracted.pages}


def set_limit(kind: int, soft: int, *, grace: int = 0) -> None:
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system does not have this one
        resource.setrlimit(kind, (soft, soft + grace))


def register_package(name: str) -> None:
    """Make the modules of a package importable without running its `__init__.py`."""
    module = types.ModuleType(name)
    module.__path__ = [str(Path(__file__).resolve().parents[1] / name)]
    sys.modules[name] = module


if __name__ == "__main__":
    register_package("documents")
    main()
