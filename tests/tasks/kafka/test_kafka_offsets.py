"""A committed offset means that everything before it is done; committing one record too many would lose its tasks."""

from __future__ import annotations

import uuid

from tasks.kafka.offsets import Offsets

A, B, C, D = (uuid.UUID(int=number) for number in range(4))


def test_a_record_is_done_when_all_of_its_tasks_are_claimed() -> None:
    offsets = Offsets()
    offsets.delivered(0, 7, [A, B])
    assert offsets.owned([B]) == {}
    assert offsets.waiting() == [A, B]
    assert offsets.owned([]) == {0: 8}
    assert offsets.owned([]) == {}


def test_a_finished_record_waits_for_earlier_records_of_its_own_partition_only() -> None:
    offsets = Offsets()
    offsets.delivered(0, 1, [A])
    offsets.delivered(0, 2, [B])
    offsets.delivered(1, 5, [C])
    assert offsets.owned([A]) == {1: 6}
    assert offsets.owned([]) == {0: 3}


def test_a_record_without_ids_blocks_no_other_record_and_overtakes_none() -> None:
    offsets = Offsets()
    offsets.delivered(0, 1, [])
    offsets.delivered(0, 2, [A])
    offsets.delivered(0, 3, [])
    assert offsets.owned([A]) == {0: 2}
    assert offsets.owned([]) == {0: 4}


def test_a_task_in_two_records_is_done_in_both() -> None:
    offsets = Offsets()
    offsets.delivered(0, 1, [A])
    offsets.delivered(1, 1, [A, D])
    assert offsets.owned([D]) == {0: 2}
    assert offsets.owned([]) == {1: 2}


def test_a_revoked_partition_is_never_committed() -> None:
    offsets = Offsets()
    offsets.delivered(0, 1, [A])
    offsets.delivered(1, 1, [B])
    offsets.forget([0, 9])
    assert offsets.waiting() == [B]
    assert offsets.owned([]) == {1: 2}
