"""Collect the files to upload from files and folders, each with its document name, and note which ones are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from documents.file_types import SUFFIXES, suffix_of

HIDDEN: Final = "hidden"
UNKNOWN_TYPE: Final = "unknown file type"
NOT_A_FILE: Final = "not a regular file"


@dataclass(frozen=True, slots=True)
class Failed:
    """A file that cannot be uploaded."""

    path: str
    reason: str


@dataclass(slots=True)
class Collected:
    """The files by document name, which is the path relative to the folder that was given."""

    files: dict[str, Path] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    failed: list[Failed] = field(default_factory=list)


def collect_files(paths: Sequence[Path], *, max_bytes: int) -> Collected:
    """Walk through folders without following links to folders. A file that is given itself is taken whatever it is."""
    collected = Collected()
    for path in paths:
        if path.is_dir():
            for below in _walk(path, collected):
                _add(below, printable(below.relative_to(path)), max_bytes, collected)
        else:
            _add(path, printable(Path(path.name)), max_bytes, collected)
    return collected


def printable(path: Path) -> str:
    """Return the path with bytes that are not UTF-8 written as \\xff, so that it can be stored and stays unique."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _walk(folder: Path, collected: Collected) -> Iterator[Path]:
    def note_failure(error: OSError) -> None:
        collected.failed.append(Failed(printable(Path(str(error.filename))), error.strerror or "cannot be opened"))

    for here, folders, names in os.walk(folder, onerror=note_failure):
        collected.skipped[HIDDEN] += sum(map(_is_hidden, (*folders, *names)))
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in sorted(name for name in names if not _is_hidden(name)):
            path = Path(here, name)
            if not path.is_file():
                collected.skipped[NOT_A_FILE] += 1
            elif suffix_of(name) not in SUFFIXES:
                collected.skipped[UNKNOWN_TYPE] += 1
            else:
                yield path


def _add(path: Path, name: str, max_bytes: int, collected: Collected) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        collected.failed.append(Failed(printable(path), error.strerror or "cannot be opened"))
        return
    if size > max_bytes:
        reason = f"the file has {size:,} bytes; the limit is {max_bytes:,} (DOCUMENT_MAX_BYTES)"
    elif not path.is_file():
        reason = NOT_A_FILE
    elif name in collected.files and not path.samefile(collected.files[name]):
        other = printable(collected.files[name])
        reason = f"{other} has the same name, {name}; add a folder that contains both files instead"
    else:
        collected.files[name] = path
        return
    collected.failed.append(Failed(printable(path), reason))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")
