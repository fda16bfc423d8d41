"""Pages stay small and quick, however much clients send."""

from __future__ import annotations

from api.tokens import Scope
from tests.api.callers import make_token
from tests.console.forms import page_of
from tests.console.task_pages import execute
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.command_line import submitted

REJECTED = """
    INSERT INTO ledger.receipt (id, level, kind, principal, client_id, payload_sha, policy, accepted_at, promised_by,
                                code, reason, entry)
    SELECT gen_random_uuid(), 'rejected', 'tasks', 'ann', 'c' || n, 'x', 'x', ledger.ledger_now(), ledger.ledger_now(),
           'payload_not_json', 'It is bad.', jsonb_build_object('text', repeat('y', 900000))
    FROM generate_series(1, 20) AS n
"""
CHANGES = """
    INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, created_at)
    SELECT :id, CASE n % 2 WHEN 0 THEN 'RUNNING' ELSE 'QUEUED' END, CASE n % 2 WHEN 0 THEN 'QUEUED' ELSE 'RUNNING' END,
           0, ledger.ledger_now() FROM generate_series(1, 5000) AS n
"""
AUDITS = """
    INSERT INTO ledger.task_audit (task_id, code, worker_id, detail)
    SELECT :id, 'retry_now', 'console:ann', 'no. ' || n FROM generate_series(1, 300) AS n
"""


def test_of_a_task_that_has_run_thousands_of_times_only_the_latest_changes_are_read(stack: ServersOfTests) -> None:
    (id_,) = submitted({})
    execute(CHANGES, id=id_)
    page = page_of(logged_in(make_token("ann", Scope.OPERATE)), f"/console/tasks/{id_}")
    text = words(page)
    assert "The picture counts the latest 2,000 changes." in text
    assert "4,956 more changes are left out here" in text, "of those and the one when it was submitted"
    assert page.count('<li class="visit ') == 45
    assert "It had more than 1,000 before." in text
    assert "run 1" not in text


def test_of_many_audits_the_latest_are_shown(stack: ServersOfTests) -> None:
    (id_,) = submitted({})
    execute(AUDITS, id=id_)
    page = page_of(logged_in(make_token("ann", Scope.OPERATE)), f"/console/tasks/{id_}")
    assert page.count("<td>retry_now</td>") == 100
    assert "no. 300<" in page
    assert "no. 200<" not in page
    assert "These are the 100 latest" in words(page)


def test_of_large_rejected_messages_only_the_beginnings_are_shown(stack: ServersOfTests) -> None:
    execute(REJECTED)
    page = page_of(logged_in(make_token("ann", Scope.OPERATE)), "/console/receipts")
    assert page.count("It is bad.") == 20
    assert len(page) < 200_000
    assert "These are the first 4,000 of 900,0" in words(page)
