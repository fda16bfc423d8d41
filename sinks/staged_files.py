"""Stage files in a folder, and rename them into place or remove them. Used by `files.py`, which states the contract.

Everything here takes open folders, and opens each folder from the one above it, without following a symbolic link. So
a name cannot lead out of the folder, even if another program moves links about meanwhile.

`rename_all` and `remove_all` can be repeated, and two processes may do the same at once: each of them skips what the
other one has done.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from failpoint import failpoint
from sinks.two_phase import Finished

ID: Final = "id"  # the file in the staging folder that identifies it


@contextmanager
def opened(name: str, within: int) -> Iterator[int]:
    """Open a folder that is not a symbolic link."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


def stage(contents: Iterable[bytes], staging: int, gid_folder: str) -> None:
    """Write the files 0, 1, 2 … to a new folder, durably."""
    os.mkdir(gid_folder, 0o700, dir_fd=staging)
    with opened(gid_folder, staging) as staged:
        for number, content in enumerate(contents):
            _write(str(number), content, staged)
            failpoint("files.staged")
        os.fsync(staged)
    os.fsync(staging)


def rename_all(root: int, staging: int, gid_folder: str, names: Sequence[str]) -> Finished:
    """Rename the staged files to their names, durably, and remove their empty folder."""
    try:
        with opened(gid_folder, staging) as staged:
            for number, name in enumerate(names):
                if _exists(str(number), staged):  # otherwise an earlier commit has renamed it
                    _rename(str(number), staged, root, name)
                failpoint("files.renamed")
        for folder in {tuple(name.split("/")[:depth]) for name in names for depth in range(name.count("/") + 1)}:
            with suppress(FileNotFoundError), _opened_path(root, folder) as changed:
                os.fsync(changed)
        failpoint("files.before_removal")
        os.rmdir(gid_folder, dir_fd=staging)
        os.fsync(staging)
    except FileNotFoundError:
        if _exists(gid_folder, staging):
            raise
        return Finished.ALREADY_DONE
    return Finished.DONE


def remove_all(staging: int, gid_folder: str) -> Finished:
    """Remove the staged files and their folder."""
    try:
        with opened(gid_folder, staging) as staged:
            for name in names_in(staged):
                os.unlink(name, dir_fd=staged)
        os.rmdir(gid_folder, dir_fd=staging)
        os.fsync(staging)
    except FileNotFoundError:
        if _exists(gid_folder, staging):
            raise
        return Finished.ALREADY_DONE
    return Finished.DONE


def require_place(root: int, staging: int, name: str) -> None:
    """Raise OSError if a staged file could not be renamed to this name."""
    *folders, last = name.split("/")
    with ExitStack() as stack:
        here = root
        for folder in folders:
            try:
                here = stack.enter_context(opened(folder, here))
            except FileNotFoundError:  # `rename_all` creates this folder and those below it
                require_writable(here, staging)
                return
        require_writable(here, staging)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(last, dir_fd=here, follow_symlinks=False).st_mode):
                raise _error(errno.EISDIR)


def require_writable(folder: int, staging: int) -> None:
    """Raise OSError if files of the staging folder cannot be renamed into this folder."""
    if os.fstat(folder).st_dev != os.fstat(staging).st_dev:
        raise _error(errno.EXDEV)
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
        raise _error(errno.EACCES)


def names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def create_id(staging: int) -> None:
    """Give the staging folder an id, unless it has one. The link makes the complete file appear at once."""
    made = f"{ID}-{uuid.uuid4()}"
    _write(made, str(uuid.uuid4()).encode(), staging)
    with suppress(FileExistsError):
        os.link(made, ID, src_dir_fd=staging, dst_dir_fd=staging)
    os.unlink(made, dir_fd=staging)
    os.fsync(staging)


def read_id(staging: int) -> str:
    with os.fdopen(os.open(ID, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=staging)) as file:
        return file.read()


def _write(name: str, content: bytes, folder: int) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    with os.fdopen(file, "wb") as written:
        written.write(content)
        written.flush()
        os.fsync(file)


def _rename(number: str, staged: int, root: int, name: str) -> None:
    *folders, last = name.split("/")
    # Another process has renamed the file in this moment, or removed `parent`. In the second case the file is still
    # staged, and its folder cannot be removed.
    with _opened_path(root, folders, make=True) as parent, suppress(FileNotFoundError):
        os.rename(number, last, src_dir_fd=staged, dst_dir_fd=parent)


@contextmanager
def _opened_path(root: int, folders: Iterable[str], *, make: bool = False) -> Iterator[int]:
    with ExitStack() as stack:
        here = root
        for folder in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=here)
            here = stack.enter_context(opened(folder, here))
        yield here


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
