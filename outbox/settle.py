"""Writing down what became of a batch: one transaction, a statement for each kind of outcome, conflicts audited.

Whoever finds a lease lost here writes an `outbox_flush_conflict` with what the row looks like now, and drops the row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection

import metrics
from failpoint import failpoint
from outbox import audit
from outbox.audit import FlushCode
from outbox.backoff import backoff_ms
from outbox.lease import (
    ClaimedEvent,
    ack_sent_many,
    check_dedup_many,
    fail_retry_many,
    mark_dead_many,
    release_lease_many,
    renew_lease_many,
)
from outbox.lease_statements import HASTEN, NOW
from outbox.publishers.contract import Failed, NotTried, Refused, Result, Sent
from settings import Settings

UNREACHABLE = "unreachable: "


class Flush:
    """The writing half of a relay, on one connection. Every method ends its transaction."""

    def __init__(self, connection: Connection, settings: Settings, worker_id: str) -> None:
        self.connection = connection
        self.settings = settings
        self.worker_id = worker_id

    def settle(
        self, outcomes: Sequence[tuple[ClaimedEvent, Result]], *, seconds: float, quietly: bool
    ) -> tuple[int, int, int]:
        """Returns how many were written down as sent, failed and dead. `quietly`: successes are not audited."""
        sent: dict[int, str | None] = {}
        retries: dict[int, tuple[str, float]] = {}
        dead: dict[int, str] = {}
        untried: list[int] = []
        for event, result in outcomes:
            match result:
                case NotTried():
                    untried.append(event.id)
                case Sent(external_id):
                    sent[event.id] = external_id
                case Refused(error):
                    dead[event.id] = error
                case Failed(error, _) if event.attempt_count + 1 >= self.settings.outbox_max_attempts:
                    dead[event.id] = error
                case Failed(error, retry_after):
                    retries[event.id] = (error, self._wait_ms(event, retry_after))
        events = [event for event, _ in outcomes]
        acked = self._ack(sent, events)
        audit.count(FlushCode.SUCCESS, len(acked))
        if not quietly:
            details: dict[int | None, str] = {id_: sent[id_] or "" for id_ in acked}
            audit.write(self.connection, FlushCode.SUCCESS, details, worker_id=self.worker_id)
        failpoint("relay.in_settle")
        failed = self._retry(retries, events)
        buried = self._bury(dead, events)
        self._give_back(untried, events)
        if acked:
            self._measure_delays(events, acked)
        self.connection.commit()
        _measure(seconds, success=len(acked), failure=failed, dead=buried)
        return len(acked), failed, buried

    def dead(self, errors: Mapping[int, str], events: Sequence[ClaimedEvent]) -> int:
        buried = self._bury(errors, events)
        self.connection.commit()
        metrics.OUTBOX_PUBLISH_TOTAL.labels("dead").inc(buried)
        return buried

    def charge_probe(self, probe: ClaimedEvent, error: str, *, may_die: bool) -> tuple[int, int, int]:
        """One attempt of the event that found nobody there."""
        is_last = probe.attempt_count + 1 >= self.settings.outbox_max_attempts
        failed = buried = 0
        if is_last and may_die:
            buried = self._bury({probe.id: UNREACHABLE + error}, [probe])
        elif is_last:
            release_lease_many(self.connection, [probe.id], self.worker_id, lease_token=probe.lease_token)
        else:
            failed = self._retry({probe.id: (UNREACHABLE + error, self._wait_ms(probe, None))}, [probe])
        self.connection.commit()
        metrics.OUTBOX_PUBLISH_TOTAL.labels("failure").inc(failed)
        metrics.OUTBOX_PUBLISH_TOTAL.labels("dead").inc(buried)
        return 0, failed, buried

    def drop_duplicates(self, events: Sequence[ClaimedEvent]) -> list[ClaimedEvent]:
        """Events that have already reached their destination are SENT with the earlier external id (P21).

        Of several that are the same the first is kept, and the others are given back: their turn comes when it is sent.
        """
        keys = {event.id: (event.destination, event.sameness) for event in events if event.sameness}
        found = check_dedup_many(self.connection, set(keys.values()))
        hits = {id_: found[key] for id_, key in keys.items() if key in found}
        if hits:
            acked = self._ack({id_: hit.external_id for id_, hit in hits.items()}, events)
            details: dict[int | None, str] = {id_: f"the same as {hits[id_].id}" for id_ in acked}
            audit.write(self.connection, FlushCode.DEDUP_HIT, details, worker_id=self.worker_id)
            audit.count(FlushCode.DEDUP_HIT, len(acked))
        firsts = {key: id_ for id_, key in reversed(keys.items())}
        twins = [id_ for id_, key in keys.items() if id_ not in hits and firsts[key] != id_]
        self._give_back(twins, events)
        self.connection.commit()
        gone = hits.keys() | set(twins)
        return [event for event in events if event.id not in gone]

    def renew(self, events: Sequence[ClaimedEvent], claimed_at: float, *, always: bool = False) -> list[ClaimedEvent]:
        """Before a slow call and before the ack: hold the rows for another lease. Returns those that are still held."""
        if not events or not (always or time.monotonic() - claimed_at > self.settings.outbox_lease_seconds / 3):
            return list(events)
        ids = [event.id for event in events]
        kept = renew_lease_many(self.connection, ids, self.worker_id, lease_token=events[0].lease_token)
        self._conflicts(set(ids) - kept, "renew")
        self.connection.commit()
        return [event for event in events if event.id in kept]

    def hasten(self, destination: str) -> None:
        """It answers again: what waited because nobody had answered is due at once."""
        self.connection.execute(HASTEN, {"destination": destination, "prefix": f"{UNREACHABLE}%"})
        self.connection.commit()

    def _ack(self, sent: Mapping[int, str | None], events: Sequence[ClaimedEvent]) -> set[int]:
        """The ids that are SENT now; for the others the lease was lost."""
        if not sent:
            return set()
        acked = ack_sent_many(self.connection, sent, self.worker_id, lease_token=events[0].lease_token)
        self._conflicts(set(sent) - acked, "ack")
        return acked

    def _retry(self, failures: Mapping[int, tuple[str, float]], events: Sequence[ClaimedEvent]) -> int:
        if not failures:
            return 0
        now: datetime = self.connection.execute(NOW).scalar_one()
        due = {id_: (error, now + timedelta(milliseconds=wait)) for id_, (error, wait) in failures.items()}
        done = fail_retry_many(self.connection, due, self.worker_id, lease_token=events[0].lease_token)
        self._conflicts(set(due) - done, "retry")
        details: dict[int | None, str] = {id_: due[id_][0] for id_ in done}
        audit.write(self.connection, FlushCode.RETRY, details, worker_id=self.worker_id)
        audit.count(FlushCode.RETRY, len(done))
        return len(done)

    def _bury(self, errors: Mapping[int, str], events: Sequence[ClaimedEvent]) -> int:
        if not errors:
            return 0
        done = mark_dead_many(self.connection, errors, self.worker_id, lease_token=events[0].lease_token)
        self._conflicts(set(errors) - done, "dead")
        details: dict[int | None, str] = {id_: errors[id_] for id_ in done}
        audit.write(self.connection, FlushCode.DEAD, details, worker_id=self.worker_id)
        audit.count(FlushCode.DEAD, len(done))
        return len(done)

    def _give_back(self, ids: Sequence[int], events: Sequence[ClaimedEvent]) -> None:
        if ids:
            released = release_lease_many(self.connection, ids, self.worker_id, lease_token=events[0].lease_token)
            self._conflicts(set(ids) - released, "release")

    def _conflicts(self, lost: set[int], during: str) -> None:
        audit.write_conflicts(self.connection, sorted(lost), during, worker_id=self.worker_id)
        audit.count(FlushCode.CONFLICT, len(lost))

    def _wait_ms(self, event: ClaimedEvent, retry_after_seconds: float | None) -> float:
        wait = backoff_ms(
            event.attempt_count + 1,
            base_ms=self.settings.outbox_retry_base_backoff_ms,
            cap_ms=self.settings.outbox_retry_max_backoff_ms,
            jitter=self.settings.outbox_retry_jitter,
        )
        return max(wait, (retry_after_seconds or 0) * 1000)

    def _measure_delays(self, events: Sequence[ClaimedEvent], acked: set[int]) -> None:
        now: datetime = self.connection.execute(NOW).scalar_one()
        delays = [(now - event.waiting_since).total_seconds() for event in events if event.id in acked]
        metrics.observe_many(metrics.OUTBOX_PUBLISH_DELAY_SECONDS, delays)


def _measure(seconds: float, **counts: int) -> None:
    for result, how_many in counts.items():
        if how_many:
            metrics.OUTBOX_PUBLISH_TOTAL.labels(result).inc(how_many)
            metrics.OUTBOX_PUBLISH_SECONDS.labels(result).observe(seconds)
