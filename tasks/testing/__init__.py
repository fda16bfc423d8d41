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

`crash_test` is different: it commits, and kills real worker processes at every window (`crashes.py`).
"""

from tasks.testing.clock import ClockRefused, travel
from tasks.testing.crash_report import Crash, CrashReport
from tasks.testing.crashes import crash_test
from tasks.testing.run import deliver, run, run_due, run_many
from tasks.testing.run_result import Ran, Transition
from tasks.testing.submitted import SubmittedTask, assert_submitted, submitted
from tasks.testing.windows import Window

__all__ = [
    "ClockRefused",
    "Crash",
    "CrashReport",
    "Ran",
    "SubmittedTask",
    "Transition",
    "Window",
    "assert_submitted",
    "crash_test",
    "deliver",
    "run",
    "run_due",
    "run_many",
    "submitted",
    "travel",
]
