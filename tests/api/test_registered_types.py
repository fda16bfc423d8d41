"""The API accepts types whose handlers only the workers have."""

from __future__ import annotations

from tests.api.callers import Callers, expect_error
from tests.tasks.registrations import handler_of, registered
from tests.tasks.work import rows


def test_a_type_that_only_workers_know_is_accepted_with_their_defaults(callers: Callers) -> None:
    registered(handler_of("remote.task", max_attempts=3, priority=7))
    assert callers().post("/api/tasks", json={"type": "remote.task"}).status_code == 202
    assert callers().post("/api/tasks", json={"type": "remote.task", "priority": 0}).status_code == 202
    assert sorted(rows("priority, max_attempts")) == [(0, 3), (7, 3)]


def test_a_type_that_nobody_knows_is_refused_and_stores_nothing(callers: Callers) -> None:
    registered(handler_of("remote.task"))
    message = expect_error(callers().post("/api/tasks", json={"type": "remote.tusk"}), 400, "unknown_type")
    assert "'remote.tusk', neither here nor in a worker" in message
    assert rows() == []
