"""Files and folders → what is to be uploaded, under which name, and what is left out and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from documents.file_types import SUFFIXES, suffix

HIDDEN: Final = "hidden"
UNKNOWN_KIND: Final = "unknown kind"
NO_FILE: Final = "not a regular file"


@dataclass(frozen=True, slots=True)
class Failed:
    """A file that cannot be uploaded."""

    path: str
    reason: str


@dataclass(slots=True)
class Found:
    """`files` by name, which is the path below what was given."""

    files: dict[str, Path] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    failed: list[Failed] = field(default_factory=list)


def find(given: Sequence[Path], *, most_bytes: int) -> Found:
    """Folders are walked through, links to folders not. What is named itself is taken, whatever it is."""
    found = Found()
    for path in given:
        if path.is_dir():
            for below in _walk(path, found):
                _take(below, shown(below.relative_to(path)), most_bytes, found)
        else:
            _take(path, shown(Path(path.name)), most_bytes, found)
    return found


def shown(path: Path) -> str:
    """Bytes that are no text are written as \\xff: such a name can be stored, and stays different from others."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _walk(folder: Path, found: Found) -> Iterator[Path]:
    def cannot(error: OSError) -> None:
        found.failed.append(Failed(shown(Path(str(error.filename))), error.strerror or "cannot be opened"))

    for here, folders, names in os.walk(folder, onerror=cannot):
        found.skipped[HIDDEN] += sum(map(_is_hidden, (*folders, *names)))
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in sorted(name for name in names if not _is_hidden(name)):
            path = Path(here, name)
            if not path.is_file():
                found.skipped[NO_FILE] += 1
            elif suffix(name) not in SUFFIXES:
                found.skipped[UNKNOWN_KIND] += 1
            else:
                yield path


def _take(path: Path, name: str, most_bytes: int, found: Found) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        found.failed.append(Failed(shown(path), error.strerror or "cannot be opened"))
        return
    if size > most_bytes:
        reason = f"it has {size:,} bytes, and {most_bytes:,} is the most (DOCUMENT_MAX_BYTES)"
    elif not path.is_file():
        reason = NO_FILE
    elif name in found.files and not path.samefile(found.files[name]):
        reason = f"{shown(found.files[name])} has the same name, {name}: give a folder above both"
    else:
        found.files[name] = path
        return
    found.failed.append(Failed(shown(path), reason))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")
