"""Pages stay small and quick, however much clients send."""

from __future__ import annotations

from api.tokens import Scope
from tests.api.callers import make_token
from tests.console.forms import page_of
from tests.console.task_pages import execute
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests

REJECTED = """
    INSERT INTO ledger.receipt (id, level, kind, principal, client_id, payload_sha, policy, accepted_at, promised_by,
                                code, reason, entry)
    SELECT gen_random_uuid(), 'rejected', 'tasks', 'ann', 'c' || n, 'x', 'x', ledger.ledger_now(), ledger.ledger_now(),
           'payload_not_json', 'It is bad.', jsonb_build_object('text', repeat('y', 900000))
    FROM generate_series(1, 20) AS n
"""


def test_of_large_rejected_messages_only_the_beginnings_are_shown(stack: ServersOfTests) -> None:
    execute(REJECTED)
    page = page_of(logged_in(make_token("ann", Scope.OPERATE)), "/console/receipts")
    assert page.count("It is bad.") == 20
    assert len(page) < 200_000
    assert "These are the first 4,000 of 900,0" in words(page)
