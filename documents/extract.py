"""A file → its text. HTML and PDF are read in a short-lived process with limits; a worker survives any of them.

the file is to blame          `Unreadable`: broken, encrypted, empty, too much memory or time. It will never work.
the machine may be to blame   `ReaderFailed`: no process, killed by somebody, far too slow. Another attempt may work.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from documents.decoding import decoded
from documents.file_types import Kind, charset_of, kind_of
from documents.unreadable import Extracted, TooMuchText, Unreadable
from tasks.core.outcomes import storable

MEMORY_BYTES: Final = 1 << 30  # of address space: what it really uses is less
PATIENCE: Final = 2  # times its processor time, and some seconds to begin with: the machine may be busy
START_SECONDS: Final = 10
PROGRAM: Final = Path(__file__).with_name("reader_process.py")


class ReaderFailed(Exception):
    """The process that reads a file did not end as it should."""


def extract(
    content: bytes,
    *,
    name: str,
    media_type: str,
    most: int,
    most_pages: int,
    cpu_seconds: int,
    memory_bytes: int = MEMORY_BYTES,
) -> Extracted:
    """Its text as PostgreSQL can hold it, of at most so many characters."""
    if not content:
        raise Unreadable("The file is empty.")
    kind = kind_of(name, media_type, content)
    if kind in (Kind.TEXT, Kind.MARKDOWN):  # Markdown is made to be read as it is written
        found = Extracted(decoded(content, charset_of(media_type)))
    else:
        how = {"kind": kind, "charset": charset_of(media_type), "most": most, "mostPages": most_pages}
        found = _in_a_process(content, {**how, "memoryBytes": memory_bytes, "cpuSeconds": cpu_seconds})
    if len(found.text) > most:
        raise TooMuchText(most)
    if not found.text.strip():
        raise Unreadable("There is no text in it." + (" Is it a scan?" if kind is Kind.PDF else ""))
    return Extracted(storable(found.text), found.pages)


def _in_a_process(content: bytes, how: dict[str, Any]) -> Extracted:
    """It knows nothing of our environment: there are passwords in it."""
    patience = START_SECONDS + PATIENCE * how["cpuSeconds"]
    command = [sys.executable, "-I", str(PROGRAM), json.dumps(how)]
    try:
        done = subprocess.run(command, input=content, capture_output=True, env={}, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        raise ReaderFailed(f"The {how['kind']} was not read within {patience} s.") from None
    if done.returncode == -signal.SIGXCPU:
        raise Unreadable(f"It takes more than {how['cpuSeconds']} s of processor time to be read.")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise ReaderFailed(f"The process that read the {how['kind']} ended with {done.returncode}: {said}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise Unreadable(answer["refused"])
    return Extracted(answer["text"], answer["pages"])
