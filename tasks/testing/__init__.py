"""Run handlers in your own tests, inside the transaction that your test rolls back.

    from tasks.testing import assert_submitted, run, travel

    def test_an_invoice_is_imported(db):                      # db: a session that your fixture rolls back
        ran = run("invoice.import", {"invoice": 17}, db)
        assert ran.status == "SUCCEEDED"
        assert_submitted(db, type="invoice.mail", payload={"invoice": 17})

Submitting, claiming, running and settling use production's code and statements; a savepoint takes the place of each
commit. No message is sent: wake-ups stay in the outbox of your transaction. Nothing here needs pytest;
`embedded/pytest_plugin.py` has fixtures with a whole stack.

Other processes cannot see your transaction, so there is no heartbeat, no hard time limit and no other worker.
"""

from tasks.testing.clock import ClockRefused, travel
from tasks.testing.run import deliver, run, run_due, run_many
from tasks.testing.run_result import Ran, Transition
from tasks.testing.submitted import SubmittedTask, assert_submitted, submitted

__all__ = [
    "ClockRefused",
    "Ran",
    "SubmittedTask",
    "Transition",
    "assert_submitted",
    "deliver",
    "run",
    "run_due",
    "run_many",
    "submitted",
    "travel",
]
