"""The folder of a file sink: a name cannot leave it, and one that cannot be used is named in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sinks.contract import SinkMisused, SinkNotReady
from sinks.files import FileSink
from sinks.two_phase import Finished
from tests.sinks.folders import GID, as_nobody, mounted, staged, staging, visible


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/../../x", "/etc/x", "//x", "a//b", "a/", "./a", "a/./b"),
        *(".celeriac/x", ".celeriac", ".Celeriac/x", "nul\0", "\ud800", "x" * 256, "a/" + "ä" * 128, 17, None),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(sink: FileSink, name: Any, root: Path) -> None:
    folder = sink.begin_transaction(GID).folder
    with pytest.raises(SinkMisused, match="cannot be the name of a file"):
        folder.write(name, "x")
    assert folder.contents == {}
    assert visible(root.parent) == {}


def test_a_link_that_leads_out_of_the_folder_is_not_followed(sink: FileSink, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(SinkMisused, match="is a file, a symbolic link or another file system"):
        sink.begin_transaction(GID).folder.write("link/x", "x")


def test_a_link_that_is_put_there_after_the_decision_is_not_followed(
    sink: FileSink, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    handle = staged(sink, link__x="x")
    (root / "link").symlink_to(tmp_path / "outside")
    assert sink.recover_and_commit(handle) is Finished.FAILED
    assert (list((tmp_path / "outside").iterdir()), len(staging(root))) == ([], 1)
    (root / "link").unlink()
    assert sink.recover_and_commit(handle) is Finished.DONE
    assert visible(root) == {"link/x": "x"}


def test_a_link_in_the_place_of_a_file_is_replaced_and_its_target_stays(
    sink: FileSink, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").write_text("old")
    (root / "x").symlink_to(tmp_path / "target")
    assert sink.recover_and_commit(staged(sink, x="new")) is Finished.DONE
    assert (visible(root), (tmp_path / "target").read_text()) == ({"x": "new"}, "old")


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a")])
def test_a_file_and_a_folder_of_the_same_name_are_refused_before_the_decision(
    sink: FileSink, names: tuple[str, str]
) -> None:
    folder = sink.begin_transaction(GID).folder
    folder.write(names[0], "x")
    with pytest.raises(SinkMisused, match="cannot both be files"):
        folder.write(names[1], "x")


def test_a_name_that_is_taken_after_the_write_is_refused_before_the_decision(sink: FileSink, root: Path) -> None:
    txn = sink.begin_transaction(GID)
    txn.folder.write("x", "x")
    (root / "x").mkdir()
    with pytest.raises(SinkMisused, match="'x' cannot be written"):
        sink.pre_commit(txn)
    assert staging(root) == []


@pytest.mark.parametrize("name", ["taken", "file/x"])
def test_a_name_that_cannot_be_written_is_refused_before_the_decision(sink: FileSink, root: Path, name: str) -> None:
    (root / "taken").mkdir()
    (root / "file").write_text("")
    with pytest.raises(SinkMisused, match="cannot be written"):
        sink.begin_transaction(GID).folder.write(name, "x")


def test_another_file_system_inside_the_folder_is_refused_before_the_decision(sink: FileSink, root: Path) -> None:
    with mounted(root / "other", "64k"), pytest.raises(SinkMisused, match="another file system"):
        sink.begin_transaction(GID).folder.write("other/x", "x")


@pytest.fixture
def reachable(root: Path) -> Iterator[None]:
    """Let other users enter the folder: pytest's own are private."""
    closed = [path for path in (root, *root.parents) if not path.stat().st_mode & 0o005]
    modes = {path: path.stat().st_mode for path in closed}
    for path in closed:
        path.chmod(0o755)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


@pytest.mark.parametrize("forbidden", [".", ".celeriac", "sub"])
def test_a_folder_that_may_not_be_written_is_named_in_a_sentence(
    sink: FileSink, root: Path, reachable: None, forbidden: str
) -> None:
    (root / "sub").mkdir()
    for path in (root, root / ".celeriac", root / "sub"):
        path.chmod(0o555 if path == root / forbidden else 0o777)
    with as_nobody(), pytest.raises(SinkNotReady, match=r"sink files cannot use the folder .*ex ports: permission"):
        staged(sink, x="x", sub__y="y")
    if forbidden != "sub":
        with as_nobody(), pytest.raises(SinkNotReady, match="permission denied"):
            sink.check()


def test_a_commit_that_is_not_permitted_is_repeated_later(sink: FileSink, root: Path, reachable: None) -> None:
    handle = staged(sink, x="x")
    for path in (root / ".celeriac", *(root / ".celeriac").iterdir()):
        path.chmod(0o777)
    with as_nobody():
        assert sink.recover_and_commit(handle) is Finished.RETRY_LATER
    assert sink.recover_and_commit(handle) is Finished.DONE


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///nowhere/at/all", "needs the folder /nowhere/at/all: create it"),
        ("file:///etc/passwd", "needs the folder /etc/passwd"),
        ("file:///etc", "is not prepared for the sink files, or its disk is not mounted"),
        ("file://srv/exports", "must look like file:///srv/exports"),
        ("file:exports", "must look like"),
        ("file:///srv/%00", "must look like"),
        ("file://[::1", "must look like"),
    ],
)
def test_a_folder_that_cannot_be_used_is_not_ready(url: str, sentence: str) -> None:
    sink = FileSink("files", url)
    with pytest.raises(SinkNotReady, match=sentence):
        sink.check()
    with pytest.raises(SinkNotReady, match=sentence):
        sink.begin_transaction(GID)
    assert sink.recover_and_commit({"gid": GID, "folder": "", "names": []}) is Finished.RETRY_LATER


def test_preparing_twice_keeps_the_id_of_the_folder(sink: FileSink) -> None:
    handle = staged(sink, x="x")
    sink.prepare()
    assert sink.recover_and_commit(handle) is Finished.DONE
    assert sink.check() == "its folder can be written"
