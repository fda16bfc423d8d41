"""Files: a commit can be repeated from any point, and nothing that was staged stays for ever."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from models.engine import engine
from models.errors import CeleriacError
from sinks.configuration import open_sinks
from sinks.contract import SinkMisused
from sinks.files import FileSink, Folder
from sinks.recovery import recover
from sinks.two_phase import Finished, gid_of
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tests.servers import ServersOfTests
from tests.sinks.folders import GID, mounted, staged, staging, visible, writing
from tests.sinks.test_conformance import recovered
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost, start_child
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import task as row


@pytest.fixture
def files(root: Path, configure: Callable[..., None]) -> FileSink:
    """A prepared folder as the sink `files` of tasks."""
    configure(files={"url": root.as_uri(), "guarantee": "two_phase"})
    sink = open_sinks().find("files")
    assert isinstance(sink, FileSink)
    sink.prepare()
    return sink


def test_contents_are_text_bytes_or_canonical_json_and_the_last_write_of_a_name_stays(
    sink: FileSink, root: Path
) -> None:
    txn = sink.begin_transaction(GID)
    given = {"text": "ä\n", "bytes": b"\xff\x00", "year/json": {"b": 1, "a": "ä"}, "view": memoryview(b"v"), "x": 1}
    for name, content in given.items():
        txn.folder.write(name, content)
    txn.folder.write("x", "2")
    with pytest.raises(CeleriacError, match="content of 'nan' is not valid JSON"):
        txn.folder.write("nan", float("nan"))
    sink.pre_commit(txn)
    assert visible(root) == {}
    assert sink.commit(txn) is Finished.DONE
    found = {name: (root / name).read_bytes() for name in given}
    json_ = '{"a":"ä","b":1}'.encode()
    assert found == {"text": "ä\n".encode(), "bytes": b"\xff\x00", "year/json": json_, "view": b"v", "x": b"2"}


def test_a_write_that_would_be_lost_is_refused(sink: FileSink) -> None:
    for end in (sink.pre_commit, sink.abort):
        txn = sink.begin_transaction(GID)
        end(txn)
        with pytest.raises(SinkMisused, match="only until the handler returns"):
            txn.folder.write("x", "x")


def test_a_task_that_writes_no_file_leaves_nothing_behind(files: FileSink, root: Path) -> None:
    assert state(ran(writing()))[0] == "SUCCEEDED"
    assert (staging(root), recover(engine()).left) == ([], [])


def test_all_files_of_a_task_appear_and_a_failed_task_writes_none(files: FileSink, root: Path) -> None:
    def write_and_fail(task: Task) -> None:
        writing("lost.json")(task)
        raise KeyError("no")

    ran(write_and_fail)
    assert (visible(root), staging(root)) == ({}, [])
    ran(writing("1.json", "2026/2.json"))
    assert (visible(root), staging(root)) == ({"1.json": "1.json", "2026/2.json": "2026/2.json"}, [])


@pytest.mark.guarantee
def test_a_commit_that_was_interrupted_renames_the_rest_and_touches_nothing_else(
    files: FileSink, root: Path, ledger: ServersOfTests
) -> None:
    """Meanwhile a reader has taken the first file away, and another program has written the second."""
    with handled(TYPE, writing("a/1", "a/2", "b/3", "b/4"), transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], "files.renamed=kill@2")
    assert sorted(visible(root)) == ["a/1", "a/2"]
    (root / "a/1").unlink()
    (root / "a/2").write_text("newer")
    assert len(recover(engine()).committed) == 1
    assert visible(root) == {"a/2": "newer", "b/3": "b/3", "b/4": "b/4"}
    assert (state(id_)[0], staging(root)) == ("SUCCEEDED", [])


def test_a_folder_that_a_reader_has_emptied_and_removed_is_not_created_again(sink: FileSink, root: Path) -> None:
    handle = staged(sink, a__1="x", b__2="y")
    (gid_folder,) = staging(root)
    (root / ".celeriac" / gid_folder / "0").unlink()  # as if it had been renamed, read and deleted with its folder
    assert sink.recover_and_commit(handle) is Finished.DONE
    assert sorted(path.name for path in root.iterdir()) == [".celeriac", "b"]


@pytest.mark.guarantee
@pytest.mark.parametrize("window", ["files.renamed", "files.before_removal"])
def test_two_recoverers_at_once_do_not_disturb_each_other(sink: FileSink, root: Path, window: str) -> None:
    """The first one is suspended in the middle, the second one does everything, then the first one goes on."""
    handle = staged(sink, a__1="1", a__2="2")
    answers, answered = os.pipe()

    def commit() -> None:
        os.write(answered, sink.recover_and_commit(handle).encode())

    pid = start_child(commit, failpoints=f"{window}=pause")
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert sink.recover_and_commit(handle) is Finished.DONE
    (root / "a/2").unlink()  # a reader has taken it
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    assert os.read(answers, 100) == b"already_done"
    assert (visible(root), staging(root)) == ({"a/1": "1"}, [])
    os.close(answers)
    os.close(answered)


@pytest.mark.guarantee
def test_files_that_a_late_worker_stages_after_the_abort_are_removed(
    files: FileSink, root: Path, ledger: ServersOfTests
) -> None:
    with handled(TYPE, writing("x"), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        late = start_child(
            lambda: deliver(engine(), [id_]), failpoints="sinks.after_handles=pause;sinks.after_prepare=kill"
        )
        os.waitpid(late, os.WUNTRACED)
        recovered(ledger)
        delivered([id_])
        assert (state(id_)[0], visible(root), staging(root)) == ("SUCCEEDED", {"x": "x"}, [])
        (root / "x").write_text("newer")
        os.kill(late, signal.SIGCONT)
        os.waitpid(late, 0)
    assert len(staging(root)) == 1
    assert len(recover(engine()).aborted) == 1
    assert (visible(root), staging(root)) == ({"x": "newer"}, [])


def test_a_worker_that_dies_while_it_stages_leaves_nothing_for_ever(
    files: FileSink, root: Path, ledger: ServersOfTests
) -> None:
    with handled(TYPE, writing("x", "y"), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], "files.staged=kill")
        assert recover(engine()).aborted == []  # its lease has not expired, so it may still be running
        assert len(staging(root)) == 1
        reclaim_lost(ledger)
        assert len(recover(engine()).aborted) == 1
    assert (visible(root), staging(root)) == ({}, [])


def test_files_of_an_unknown_transaction_or_of_another_installation_are_never_touched(
    files: FileSink, root: Path
) -> None:
    unknown = gid_of(open_sinks().installation(), uuid.uuid4(), uuid.uuid4(), "files")
    of_another = gid_of(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "files")
    of_another_sink = gid_of(open_sinks().installation(), uuid.uuid4(), uuid.uuid4(), "other")
    for gid in (unknown, of_another, of_another_sink):
        staged(files, gid, x="x")
    assert recover(engine()).unknown == [unknown]
    assert len(staging(root)) == 3


def test_a_commit_whose_way_is_blocked_waits_for_an_operator(files: FileSink, root: Path) -> None:
    with handled(TYPE, writing("a", "b"), transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], "sinks.before_commit=kill")
    (root / "b").mkdir()
    assert len(recover(engine()).failed) == 1
    assert (visible(root), len(staging(root))) == ({"a": "a"}, 1)
    (root / "b").rmdir()
    assert len(recover(engine(), retries_failed=True).committed) == 1
    assert (visible(root), staging(root)) == ({"a": "a", "b": "b"}, [])


@pytest.mark.guarantee
def test_an_unmounted_disk_does_not_pass_for_a_finished_commit(files: FileSink, root: Path) -> None:
    with handled(TYPE, writing("x"), transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], "sinks.before_commit=kill")
    disk = root.with_name("disk")
    root.rename(disk)
    root.mkdir()  # an empty mount point
    assert len(recover(engine()).left) == 1
    files.prepare()  # an operator takes it for the disk
    found = recover(engine())
    assert (found.committed, len(found.left)) == ([], 1)
    (root / ".celeriac/id").unlink()
    (root / ".celeriac").rmdir()
    root.rmdir()
    disk.rename(root)
    assert len(recover(engine()).committed) == 1
    assert visible(root) == {"x": "x"}


def test_a_full_disk_is_a_failure_of_the_task_and_leaves_nothing_behind(files: FileSink, root: Path) -> None:
    content = ["x" * 100_000]

    def write(task: Task) -> None:
        task.sink("files").run(lambda folder: [folder.write("small", "s"), folder.write("large", content[0])])

    with mounted(root, "64k"), handled(TYPE, write, transactional=False, backoff=[0]):
        files.prepare()
        (id_,) = submitted(1, TYPE)
        delivered([id_])
        assert state(id_) == ("RETRYING", 1, "handler_error")
        assert "No space left on device" in row(id_)["error_message"]
        assert (visible(root), staging(root)) == ({}, [])
        content[0] = "y"
        delivered([id_])
        assert (state(id_)[0], visible(root)) == ("SUCCEEDED", {"small": "s", "large": "y"})


def test_a_file_is_not_hidden_from_users_who_may_read_new_files(files: FileSink, root: Path) -> None:
    payment = {"amount": 100}

    def settle(task: Task) -> None:
        task.sink("files").run(lambda folder: folder.write("17.json", payment))

    ran(settle)
    assert json.loads((root / "17.json").read_text()) == payment
    assert (root / "17.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_effects_keep_the_order_of_their_partition_key(files: FileSink, root: Path, ledger: ServersOfTests) -> None:
    """The first task is decided but not renamed when the second one runs: the second must not be overwritten."""

    def write(task: Task) -> None:
        def put(folder: Folder) -> None:
            folder.write("state", str(task.payload))

        task.sink("files").run(put)

    with handled(TYPE, write, transactional=False, backoff=[0]):
        first, second = submitted(2, TYPE, lambda n: n, partition_key="customer 1")
        killed([first], "sinks.before_commit=kill")
        later(ledger, 3600)
        delivered([second])
    recover(engine())
    assert (state(second)[0], visible(root)) == ("SUCCEEDED", {"state": "1"})
