"""For your own tests: run a handler for real, inside the transaction that your test rolls back.

from tasks.testing import assert_submitted, run, travel

def test_an_invoice_is_imported(db):                      # db: a session that your fixture rolls back
    ran = run("invoice.import", {"invoice": 17}, db)
    assert ran.status == "SUCCEEDED"
    assert_submitted(db, type="invoice.mail", payload={"invoice": 17})

Submit, guard, handler, settle are those of production and send the same statements; what they would commit is a
savepoint here. No message leaves: the wake-ups stay in the outbox of your transaction. Nothing here needs pytest; a whole
stack as a fixture is in `embedded/pytest_plugin.py`.

What is different: nobody else sees your transaction, so there is no heartbeat, no hard time limit and no other worker.
"""

from tasks.testing.clock import ClockRefused, travel
from tasks.testing.ran import Ran, Transition
from tasks.testing.run import deliver, run, run_due, run_many
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
