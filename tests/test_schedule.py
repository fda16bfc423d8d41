"""The order of the test files names files that exist."""

from __future__ import annotations

from settings import ROOT
from tests.schedule import LONGEST_FIRST, UNITS, unit_of


def test_every_file_of_the_order_exists_and_is_named_once() -> None:
    named = [name for names in (LONGEST_FIRST, *UNITS.values()) for name in names if name not in UNITS]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(set(named)) == len(named)


def test_files_that_need_the_same_servers_go_to_one_process_and_other_files_by_themselves() -> None:
    for unit, files in UNITS.items():
        assert {unit_of(f"{name}::test_a[b::c]") for name in files} == {unit}
    assert unit_of("tests/test_docs.py::test_a") == "tests/test_docs.py"
