"""A two-phase sink in a folder of files: staged and fsynced first, renamed into place after the ledger's decision.

    task.sink("exports").run(lambda folder: folder.write("2026/17.json", payment))

    the handler writes   the contents wait in memory
    (the handle)         the ledger stores the names of the files
    pre_commit           the contents go to ROOT/.celeriac/GID/0, 1, 2 …, and files and folders are fsynced
    (the decision)       `commit` and SUCCEEDED, in the ledger
    commit               renames each file to its name, fsyncs the folders, and removes the empty GID folder
    abort                removes the GID folder with its files

The ledger decides. The GID folder says what is left to do: a file that is no longer in it has been renamed. So a commit
can be repeated from any point. It deletes no file that it has not renamed.

Nothing is on disk before the handle is in the ledger; that is why the contents wait in memory. So recovery knows every
GID folder, and removes the ones without a decision like any other transaction. There is no rule about their age.

    died while staging, or before the decision    recovery aborts
    died between two renames                      recovery renames the rest
    disk full, or permission denied, in staging   the task fails, and what was staged is removed
    the folder is missing, or is another one      recovery waits. `prepare` gives the folder an id, which the handle
                                                  repeats: an unmounted disk must not pass for a finished commit
    a folder or link has taken a file's place     `failed`: an operator clears the way and runs `manage.py recover`

`staged_files.py` does the work in the folders.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from models.driver_values import storable
from models.errors import shorten
from outbox.canonical_json import canonical_json
from sinks import staged_files
from sinks.contract import SinkMisused, SinkNotReady
from sinks.staged_files import opened
from sinks.two_phase import Finished, TwoPhaseCommitSink, sink_of

logger = logging.getLogger(__name__)

STAGING: Final = ".celeriac"
LONGEST_PART: Final = 255  # bytes between two slashes of a name, on all common file systems
IN_THE_WAY: Final = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
NOT_PERMITTED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
Function = Callable[[Any], Any]


@dataclass(slots=True)
class Folder:
    """What a function that is given to `run` writes to. The files appear when the task has succeeded."""

    sink: FileSink
    contents: dict[str, bytes] = field(default_factory=dict)
    is_open: bool = True

    def write(self, name: str, content: Any) -> None:
        """Write a file such as "17.json" or "2026/17.json". A second write of the same name replaces the first.

        Text is written as UTF-8 and bytes as they are; any other value becomes canonical JSON.
        """
        if not self.is_open:
            raise SinkMisused("The folder can be written to only until the handler returns.")
        _check_name(name, self.contents)
        self.sink.require_place([name])
        if isinstance(content, bytes | bytearray | memoryview):
            self.contents[name] = bytes(content)
        else:
            text = content if isinstance(content, str) else canonical_json(content, what=f"content of {name!r}")
            self.contents[name] = text.encode()


@dataclass(slots=True)
class FileTransaction:
    """The files that one task writes."""

    gid: str
    folder_id: str
    folder: Folder

    @property
    def handle(self) -> dict[str, Any]:
        return {"gid": self.gid, "folder": self.folder_id, "names": list(self.folder.contents)}


@dataclass(frozen=True, slots=True)
class OpenFolders:
    """The descriptors of the folder and of its staging folder."""

    root: int
    staging: int
    id: str


class FileSink(TwoPhaseCommitSink[Function, FileTransaction]):
    """A folder of files."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.root = _path_of(url)

    @property
    def conditions(self) -> Sequence[str]:
        return [
            "The folder is on one local file system, and every worker sees it under the same path.",
            "Each file appears complete or not at all; several files of one task appear one after the other.",
            "If two tasks write the same name, the later commit wins.",
            f"All workers run as the same user, and no other program changes the folder {STAGING}.",
        ]

    def begin_transaction(self, checkpoint_id: str) -> FileTransaction:
        with self._open() as folders:
            return FileTransaction(checkpoint_id, folders.id, Folder(self))

    def invoke(self, value: Function, txn: FileTransaction) -> Any:
        return value(txn.folder)

    def pre_commit(self, txn: FileTransaction) -> None:
        txn.folder.is_open = False
        if contents := txn.folder.contents:
            self.require_place(contents)
            with self._open() as folders:
                staged_files.stage(contents.values(), folders.staging, _gid_folder(txn.gid))

    def commit(self, txn: FileTransaction) -> Finished:
        return self.recover_and_commit(txn.handle)

    def abort(self, txn: FileTransaction) -> Finished:
        if txn.folder.is_open:  # nothing is staged
            txn.folder.is_open = False
            return Finished.DONE
        return self.recover_and_abort(txn.handle)

    def recover_and_commit(self, handle: dict[str, Any]) -> Finished:
        def rename_all(folders: OpenFolders) -> Finished:
            if handle["folder"] != folders.id:
                raise SinkNotReady(f"{self.root} is not the folder in which the files were staged.")
            return staged_files.rename_all(folders.root, folders.staging, _gid_folder(handle["gid"]), handle["names"])

        return self._finish(handle["gid"], rename_all)

    def recover_and_abort(self, handle: dict[str, Any]) -> Finished:
        def remove_all(folders: OpenFolders) -> Finished:
            return staged_files.remove_all(folders.staging, _gid_folder(handle["gid"]))

        return self._finish(handle["gid"], remove_all)

    def list_prepared(self, prefix: str) -> Iterable[str]:
        with self._open() as folders:
            gids = map(unquote, staged_files.names_in(folders.staging))
        return [gid for gid in gids if gid.startswith(prefix) and sink_of(gid) == self.name]

    def handle_of(self, gid: str) -> dict[str, Any]:
        return {"gid": gid}

    def check(self) -> str:
        with self._open() as folders:
            for folder in (folders.root, folders.staging):
                staged_files.require_writable(folder, folders.staging)
        return "its folder can be written"

    def prepare(self) -> str:
        """Create the staging folder with the id of the folder. The folder itself must exist."""
        with self._open_root() as root:
            with suppress(FileExistsError):
                os.mkdir(STAGING, 0o700, dir_fd=root)
            with opened(STAGING, root) as staging:
                staged_files.create_id(staging)
            os.fsync(root)
        return f"{self.root}/{STAGING} is there"

    def close(self) -> None:
        """Nothing is open."""

    def require_place(self, names: Iterable[str]) -> None:
        """Raise SinkMisused if a file of one of these names could not be renamed into place later."""
        with self._open() as folders:
            for name in names:
                try:
                    staged_files.require_place(folders.root, folders.staging, name)
                except OSError as error:
                    if error.errno not in IN_THE_WAY:
                        raise
                    raise SinkMisused(
                        f"The file {shorten(name)} cannot be written: it is a folder, or a folder on the way to it is "
                        "a file, a symbolic link or another file system."
                    ) from None

    def _finish(self, gid: str, work: Callable[[OpenFolders], Finished]) -> Finished:
        """Do the work. An error is an answer, too: one transaction must not stop the recovery of the others."""
        try:
            with self._open() as folders:
                return work(folders)
        except (OSError, SinkNotReady) as error:
            logger.warning(
                "Sink %s: the transaction %s is not finished: %s",
                self.name,
                gid,
                error,
                extra={"event": "sink_unfinished", "sink": self.name},
            )
            is_known_to_fail = isinstance(error, OSError) and error.errno in IN_THE_WAY
            return Finished.FAILED if is_known_to_fail else Finished.RETRY_LATER

    @contextmanager
    def _open(self) -> Iterator[OpenFolders]:
        with self._open_root() as root, ExitStack() as stack:
            try:
                staging = stack.enter_context(opened(STAGING, root))
                id_ = staged_files.read_id(staging)
            except (FileNotFoundError, NotADirectoryError):
                raise SinkNotReady(
                    f"{self.root} is not prepared for the sink {self.name}, or its disk is not mounted: "
                    f"mount it, or run `manage.py sinks prepare {self.name}`."
                ) from None
            yield OpenFolders(root, staging, id_)

    @contextmanager
    def _open_root(self) -> Iterator[int]:
        """Open the folder. What the system does not permit in it raises SinkNotReady."""
        if self.root is None:
            raise SinkNotReady(f"The address of the sink {self.name} must look like file:///srv/exports.")
        with ExitStack() as stack:
            try:
                try:
                    root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
                except (FileNotFoundError, NotADirectoryError):
                    raise SinkNotReady(f"The sink {self.name} needs the folder {self.root}: create it.") from None
                stack.callback(os.close, root)
                yield root
            except OSError as error:
                if error.errno not in NOT_PERMITTED:
                    raise
                reason = os.strerror(error.errno).lower()
                raise SinkNotReady(f"The sink {self.name} cannot use the folder {self.root}: {reason}.") from None


def _path_of(url: str) -> Path | None:
    """Return the folder of an address, or None if the address is not one of a folder."""
    try:
        address = urlsplit(url)
    except ValueError:
        return None
    path = unquote(address.path)
    is_local = address.netloc in ("", "localhost") and not address.query and not address.fragment
    return Path(path) if is_local and path.startswith("/") and "\0" not in path else None


def _check_name(name: str, others: Collection[str]) -> None:
    """Raise SinkMisused unless this names a file below the folder, beside the other files of the task."""
    parts = name.split("/") if isinstance(name, str) and storable(name) == name else [""]
    is_too_long = any(len(part.encode()) > LONGEST_PART for part in parts)
    if is_too_long or {"", ".", ".."} & set(parts) or parts[0].lower() == STAGING:
        raise SinkMisused(
            f"{shorten(name)} cannot be the name of a file: it must be a relative path without '..' or NUL, outside "
            f"{STAGING}, with at most {LONGEST_PART} bytes between two slashes."
        )
    for other in others:
        if other.startswith(f"{name}/") or name.startswith(f"{other}/"):
            raise SinkMisused(f"{shorten(name)} and {shorten(other)} cannot both be files.")


def _gid_folder(gid: str) -> str:
    return quote(gid, safe="")
