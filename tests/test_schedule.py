"""The order of the test files names files that exist."""

from __future__ import annotations

from settings import ROOT
from tests.schedule import LONGEST_FIRST, RABBITMQ, WITH_RABBITMQ, unit_of


def test_every_file_of_the_order_exists_and_is_named_once() -> None:
    named = [name for name in (*LONGEST_FIRST, *WITH_RABBITMQ) if name != RABBITMQ]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(set(named)) == len(named)


def test_files_that_need_rabbitmq_go_to_one_process_and_other_files_by_themselves() -> None:
    assert {unit_of(f"{name}::test_a[b::c]") for name in WITH_RABBITMQ} == {RABBITMQ}
    assert unit_of("tests/test_docs.py::test_a") == "tests/test_docs.py"
