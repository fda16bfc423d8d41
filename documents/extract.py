"""Extract the text of a file. HTML and PDF are parsed in a short-lived child process with limits on memory and time.

`Unreadable`     the file is at fault: broken, encrypted, empty, too large or too slow to parse. A retry cannot help.
`ReaderFailed`   the machine may be at fault: the process was killed, or it was far too slow. A retry may help.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from documents.decoding import NOT_STORABLE, decode
from documents.file_types import Kind, charset_of, detect_kind
from documents.unreadable import Extracted, TooMuchText, Unreadable

MEMORY_BYTES: Final = 1 << 30  # address space; the memory in use is less
CLOCK_PER_CPU_SECOND: Final = 2  # the machine may be busy, so wall-clock time may be longer than processor time
START_SECONDS: Final = 10
PROGRAM: Final = Path(__file__).with_name("reader_process.py")


class ReaderFailed(Exception):
    """The child process that parses a file did not finish normally."""


def extract(
    content: bytes,
    *,
    name: str,
    media_type: str,
    max_characters: int,
    max_pages: int,
    cpu_seconds: int,
    memory_bytes: int = MEMORY_BYTES,
) -> Extracted:
    """Return the text of a file, free of characters that PostgreSQL cannot store."""
    if not content:
        raise Unreadable("The file is empty.")
    kind = detect_kind(name, media_type, content)
    if kind in (Kind.TEXT, Kind.MARKDOWN):  # Markdown is readable as it is written
        extracted = Extracted(decode(content, charset_of(media_type)))
    else:
        limits = {"memoryBytes": memory_bytes, "cpuSeconds": cpu_seconds}
        sizes = {"maxCharacters": max_characters, "maxPages": max_pages}
        extracted = _read_in_child(content, {"kind": kind, "charset": charset_of(media_type), **sizes, **limits})
    if len(extracted.text) > max_characters:
        raise TooMuchText(max_characters)
    if not extracted.text.strip():
        raise Unreadable("The file has no text." + (" Is it a scan?" if kind is Kind.PDF else ""))
    return Extracted(NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", extracted.text), extracted.pages)


def _read_in_child(content: bytes, options: dict[str, Any]) -> Extracted:
    """Run the parser with an empty environment, because ours contains passwords."""
    seconds = START_SECONDS + CLOCK_PER_CPU_SECOND * options["cpuSeconds"]
    command = [sys.executable, "-I", str(PROGRAM), json.dumps(options)]
    try:
        done = subprocess.run(command, input=content, capture_output=True, env={}, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        sentence = (
            f"Reading the {options['kind']} file took longer than {seconds:g} s (10 s + 2 · DOCUMENT_MAX_SECONDS)."
        )
        raise ReaderFailed(sentence) from None
    if done.returncode == -signal.SIGXCPU:
        raise Unreadable(
            f"Reading the file takes more than {options['cpuSeconds']} s of processor time (DOCUMENT_MAX_SECONDS)."
        )
    if done.returncode == -signal.SIGKILL:
        raise ReaderFailed(f"The process that reads {options['kind']} files was killed; the machine may lack memory.")
    if done.returncode:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise ReaderFailed(f"The process that reads {options['kind']} files exited with {done.returncode}: {last_line}")
    answer = json.loads(done.stdout)
    if "unreadable" in answer:
        raise Unreadable(answer["unreadable"])
    return Extracted(answer["text"], answer["pages"])
