"""Finish what died workers have left in two-phase sinks. The ledger's decision is the only authority.

    decided `commit`, still prepared in the sink     commit
    decided `commit`, gone from the sink             it was committed; record that
    undecided, and the token of the attempt is gone  decide `abort`, then abort
    decided `abort`                                  abort
    prepared in the sink, decided `abort` long ago   abort: it was prepared late, by a worker that had lost its task
    prepared in the sink, unknown to the ledger      report it, never touch it

The rows of the ledger are read before the list of the sink. The other way round, a transaction that is prepared and
decided in between would be missing in the list, and would be taken for committed.

Two recoveries at once are harmless: both obey the same decision, and the second one finds nothing left to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

import metrics
from failpoint import failpoint
from sinks import transactions
from sinks.configuration import open_sinks
from sinks.transactions import ABORT_ORPHANS, FAIL, UnfinishedTransaction
from sinks.two_phase import Finished, TwoPhaseCommitSink, gid_prefix

logger = logging.getLogger(__name__)

OBEYED: Final = (Finished.DONE, Finished.ALREADY_DONE)


@dataclass(slots=True)
class Recovered:
    """What one recovery did, as gids."""

    committed: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # the sink does not answer, or the attempt is still running
    failed: list[str] = field(default_factory=list)  # an operator must look
    unknown: list[str] = field(default_factory=list)  # prepared in a sink, and not in the ledger


def recover(engine: Engine, *, retries_failed: bool = False, only: str | None = None) -> Recovered:
    """Finish every transaction that can be finished now. A sink that does not answer keeps no other one waiting.

    What a sink has refused is tried again only if an operator asks for it (`retries_failed`). `only` is the name of the
    one sink whose transactions are finished; None: all.
    """
    found = Recovered()
    chosen = [sink for sink in open_sinks().all() if only in (None, sink.name)]
    two_phase = [sink for sink in chosen if isinstance(sink, TwoPhaseCommitSink)]
    with engine.begin() as connection:
        if two_phase:
            connection.execute(ABORT_ORPHANS)
        rows = [row for row in transactions.unfinished(connection) if only in (None, row.sink)]
    rows = [row for row in rows if retries_failed or row.state != "failed"]
    failpoint("recovery.after_rows")
    for sink in two_phase:
        of_sink = [row for row in rows if row.sink == sink.name]
        try:
            _RecoveryOfSink(engine, sink, found).run(of_sink)
        except Exception as error:  # client libraries raise many kinds
            logger.warning(
                "Sink %s cannot be recovered now: %s",
                sink.name,
                str(error).partition("\n")[0],
                extra={"event": "sink_not_recovered", "sink": sink.name},
            )
            found.left += [row.gid for row in of_sink if row.gid not in (*found.committed, *found.aborted)]
    known = {sink.name for sink in two_phase}
    found.left += [row.gid for row in rows if row.sink not in known]
    return found


def prune_keys(engine: Engine) -> int:
    """Delete keys of keyed sinks after their key life, and finished transactions of pruned tasks; return how many keys.

    A sink that cannot be reached is tried again by the next tick.
    """
    with Session(engine) as db:
        transactions.prune(db)
        db.commit()
    pruned = 0
    for sink in open_sinks().all():
        try:
            pruned += sink.prune(open_sinks().installation())
        except Exception as error:  # client libraries raise many kinds
            logger.warning(
                "Old keys of the sink %s are kept for now: %s",
                sink.name,
                str(error).partition("\n")[0],
                extra={"event": "sink_keys_kept", "sink": sink.name},
            )
    return pruned


@dataclass(frozen=True, slots=True)
class _RecoveryOfSink:
    engine: Engine
    sink: TwoPhaseCommitSink[Any, Any]
    found: Recovered

    def run(self, rows: Iterable[UnfinishedTransaction]) -> None:
        prepared = set(self.sink.list_prepared(gid_prefix(open_sinks().installation())))
        for row in rows:
            prepared.discard(row.gid)
            if row.decision is None:
                self.found.left.append(row.gid)  # the attempt may still be running
            else:
                self._obey(row.gid, row.decision, row.handle)
        decided = transactions.decisions(self.engine, prepared)
        for gid in sorted(prepared):
            if gid not in decided:
                self._report_unknown(gid)
            elif decided[gid] == "abort":
                self._obey(gid, "abort", self.sink.handle_of(gid))
            # Otherwise it was prepared after the rows were read: the next recovery sees it.

    def _obey(self, gid: str, decision: str, handle: dict[str, Any]) -> None:
        commits = decision == "commit"
        done = self.sink.recover_and_commit(handle) if commits else self.sink.recover_and_abort(handle)
        metrics.SINK_RECOVERY_TOTAL.labels(self.sink.name, done).inc()
        failpoint("recovery.after_obeyed")
        if done in OBEYED:
            transactions.finish(self.engine, [gid])
            (self.found.committed if commits else self.found.aborted).append(gid)
        elif done is Finished.RETRY_LATER:
            self.found.left.append(gid)
        else:
            with self.engine.begin() as connection:
                connection.execute(FAIL, {"gid": gid})
            self.found.failed.append(gid)
            logger.error(
                "Sink %s cannot finish the transaction %s: %s.",
                self.sink.name,
                gid,
                done,
                extra={"event": "sink_not_recovered", "sink": self.sink.name},
            )

    def _report_unknown(self, gid: str) -> None:
        self.found.unknown.append(gid)
        metrics.SINK_RECOVERY_TOTAL.labels(self.sink.name, "unknown_to_ledger").inc()
        logger.error(
            "Sink %s has the prepared transaction %s, which the ledger does not know.",
            self.sink.name,
            gid,
            extra={"event": "sink_unknown_transaction", "sink": self.sink.name},
        )
