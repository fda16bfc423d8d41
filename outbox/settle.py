"""Settling a batch: write the outcome of each event in one transaction, with one statement per kind of outcome.

An event whose lease was lost is dropped. Its audit row, `outbox_flush_conflict`, says what the event looks like now.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection

import metrics
from failpoint import failpoint
from outbox import audit, lease
from outbox.audit import AuditCode
from outbox.backoff import backoff_ms
from outbox.lease import ClaimedEvent
from outbox.lease_statements import (
    DEAD_PROBE,
    LOCK_SAMENESS,
    MAKE_DUE,
    NOW,
    REQUEUE_UNANSWERED,
    UNLOCK_SAMENESS,
    UNREACHABLE,
)
from outbox.publishers.contract import Failed, NotTried, Refused, Result, Sent
from settings import Settings
from tally.counts import count
from tally.subjects import Subject

OTHER_RELAY_SECONDS: Final = 0.1  # pause while another relay publishes equal events


class Settlement:
    """Write the outcomes of claimed events on one connection. Every public method ends its transaction.

    The events of one call share a token: they come from one claim, or were inserted by one process.
    """

    def __init__(self, connection: Connection, settings: Settings, worker_id: str) -> None:
        self.connection = connection
        self.settings = settings
        self.worker_id = worker_id
        self._uncommitted: Counter[AuditCode] = Counter()  # counted in the tally after the commit

    def settle(
        self, outcomes: Sequence[tuple[ClaimedEvent, Result]], *, seconds: float, audit_as_batch: bool
    ) -> tuple[int, int, int]:
        """Write the results of a publish that took `seconds`. Return how many events were sent, failed and died.

        `audit_as_batch` writes one audit row for all successes instead of one for each.
        """
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
                case Failed(error, _) if self._is_last_attempt(event):
                    dead[event.id] = error
                case Failed(error, retry_after):
                    retries[event.id] = (error, self._wait_ms(event, retry_after))
        events = [event for event, _ in outcomes]
        acked, sent_at = self._ack(sent, events, as_batch=audit_as_batch)
        failpoint("relay.in_settle")
        failed = self._retry(retries, events)
        died = self._bury(dead, events)
        self._change("release", lease.release_lease_many, untried, events)
        self._commit()
        if len(untried) < len(events):
            _observe(events, seconds)
        delays = [(sent_at - event.waiting_since).total_seconds() for event in events if event.id in acked and sent_at]
        _count(events, "success", len(acked), seconds, delays)
        _count(events, "failure", failed, seconds)
        _count(events, "dead", died, seconds)
        return len(acked), failed, died

    def mark_dead(self, error: str, events: Sequence[ClaimedEvent]) -> int:
        """Mark events as DEAD that cannot be published. Return how many were still held."""
        died = self._bury(dict.fromkeys((event.id for event in events), error), events)
        self._commit()
        _count(events, "dead", died)
        return died

    def charge_probe(self, events: Sequence[ClaimedEvent], error: str, *, seconds: float) -> tuple[int, int, int]:
        """Count an attempt of the first event, the probe that found its destination unreachable; release the others."""
        probe, *others = events
        failed = died = 0
        if self._is_last_attempt(probe):
            died = self._bury({probe.id: UNREACHABLE + error}, [probe])
        else:
            failed = self._retry({probe.id: (UNREACHABLE + error, self._wait_ms(probe, None))}, [probe])
        self._change("release", lease.release_lease_many, [event.id for event in others], events)
        self._commit()
        _observe(events, seconds)
        _count(events, "failure", failed, seconds)
        _count(events, "dead", died, seconds)
        return 0, failed, died

    def release(self, events: Sequence[ClaimedEvent]) -> None:
        """Release events that were not published. No attempt is counted."""
        self._change("release", lease.release_lease_many, [event.id for event in events], events)
        self._commit()

    def drop_paused(self, events: Sequence[ClaimedEvent]) -> int:
        """Mark wake-ups of a paused queue as SENT, unpublished. Return how many were still held."""
        dropped = self._change("ack", lease.ack_sent_many, dict.fromkeys(event.id for event in events), events)
        if dropped:
            detail = f"{len(dropped)} not sent to {events[0].destination}, ids {min(dropped)} to {max(dropped)}"
            audit.write(self.connection, AuditCode.PAUSED, {min(dropped): detail}, worker_id=self.worker_id)
            self._uncommitted[AuditCode.PAUSED] += len(dropped)
        self._commit()
        return len(dropped)

    @contextmanager
    def without_duplicates(self, events: Sequence[ClaimedEvent]) -> Iterator[list[ClaimedEvent]]:
        """Yield the events that must be published; see docs/protocol.md, Dedup.

        An event that was already sent to its destination becomes SENT with the earlier external id. Of several equal
        events in the batch the first is kept and the others are released: they are duplicates once it is sent. Until
        the end of the block no other relay publishes equal events. Those that another relay publishes now are released.
        """
        wanted = sorted({(event.destination, event.sameness) for event in events if event.sameness})
        values = {"destinations": [name for name, _ in wanted], "keys": [key for _, key in wanted]}
        locked = {(name, key) for name, key in self.connection.execute(LOCK_SAMENESS, values)}
        try:
            ours = [event for event in events if not event.sameness or (event.destination, event.sameness) in locked]
            if len(ours) < len(events):
                self.release([event for event in events if event not in ours])
                time.sleep(OTHER_RELAY_SECONDS)  # otherwise they would be claimed again at once
            yield self._drop_duplicates(ours)
        finally:
            if locked and not self.connection.invalidated:
                values = {"destinations": [name for name, _ in locked], "keys": [key for _, key in locked]}
                self.connection.execute(UNLOCK_SAMENESS, values)
                self._commit()

    def _drop_duplicates(self, events: Sequence[ClaimedEvent]) -> list[ClaimedEvent]:
        keys = {event.id: (event.destination, event.sameness) for event in events if event.sameness}
        found = lease.check_dedup_many(self.connection, set(keys.values()))
        hits = {id_: found[key] for id_, key in keys.items() if key in found}
        acked = self._change("ack", lease.ack_sent_many, {id_: hit.external_id for id_, hit in hits.items()}, events)
        self._audit(AuditCode.DEDUP_HIT, {id_: f"the same as {hits[id_].id}" for id_ in acked})
        firsts = {key: id_ for id_, key in reversed(keys.items())}
        twins = [id_ for id_, key in keys.items() if id_ not in hits and firsts[key] != id_]
        self._change("release", lease.release_lease_many, twins, events)
        self._commit()
        return [event for event in events if event.id not in hits and event.id not in twins]

    def renew(self, events: Sequence[ClaimedEvent], claimed_at: float, *, always: bool = False) -> list[ClaimedEvent]:
        """Renew the leases if a third of their time is over, or `always`. Return the events that are still held."""
        if not events or not (always or time.monotonic() - claimed_at > self.settings.outbox_lease_seconds / 3):
            return list(events)
        kept = self._change("renew", lease.renew_lease_many, [event.id for event in events], events)
        self._commit()
        return [event for event in events if event.id in kept]

    def resume(self, destination: str, *, requeue_dead: bool) -> None:
        """Make the events due that wait because the destination was unreachable: it answers again.

        With `requeue_dead`, those that died of it start again, too.
        """
        self.connection.execute(MAKE_DUE, {"destination": destination})
        if requeue_dead:
            self.connection.execute(REQUEUE_UNANSWERED, {"destination": destination, "worker_id": self.worker_id})
        self._commit()

    def find_dead_probe(self, destination: str) -> ClaimedEvent | None:
        """Return an event that died because the destination was unreachable. It is not leased, and stays DEAD."""
        row = self.connection.execute(DEAD_PROBE, {"destination": destination}).one_or_none()
        self._commit()
        return ClaimedEvent(*row) if row else None

    def audit_dead_probe(self, probe: ClaimedEvent, error: str) -> None:
        """Record that the destination is still unreachable. The event is not changed."""
        self._audit(AuditCode.RETRY, {probe.id: UNREACHABLE + error})
        self._commit()
        _count([probe], "failure", 1)

    def _ack(
        self, sent: Mapping[int, str | None], events: Sequence[ClaimedEvent], *, as_batch: bool
    ) -> tuple[set[int], datetime | None]:
        """Mark events as SENT and audit them; return the ids of those that were still held, and the time."""
        if not sent:
            return set(), None
        token = events[0].lease_token
        acked, sent_at = lease.ack_sent_audited(
            self.connection, sent, self.worker_id, lease_token=token, as_batch=as_batch
        )
        self._audit_conflicts("ack", sent.keys() - acked)
        self._uncommitted[AuditCode.SUCCESS] += len(acked)
        return acked, sent_at

    def _retry(self, failures: Mapping[int, tuple[str, float]], events: Sequence[ClaimedEvent]) -> int:
        if not failures:
            return 0
        now: datetime = self.connection.execute(NOW).scalar_one()
        due = {id_: (error, now + timedelta(milliseconds=wait)) for id_, (error, wait) in failures.items()}
        changed = self._change("retry", lease.fail_retry_many, due, events)
        return self._audit(AuditCode.RETRY, {id_: due[id_][0] for id_ in changed})

    def _bury(self, errors: Mapping[int, str], events: Sequence[ClaimedEvent]) -> int:
        changed = self._change("dead", lease.mark_dead_many, errors, events)
        return self._audit(AuditCode.DEAD, {id_: errors[id_] for id_ in changed})

    def _change(
        self, name: str, write: Callable[..., set[int]], rows: Collection[int], events: Sequence[ClaimedEvent]
    ) -> set[int]:
        """Write rows under their lease, audit those whose lease was lost, and return the ids of the others."""
        if not rows:
            return set()
        changed = write(self.connection, rows, self.worker_id, lease_token=events[0].lease_token)
        self._audit_conflicts(name, set(rows) - changed)
        return changed

    def _audit_conflicts(self, during: str, lost: Collection[int]) -> None:
        audit.write_conflicts(self.connection, sorted(lost), during, worker_id=self.worker_id)
        self._uncommitted[AuditCode.CONFLICT] += len(lost)

    def _audit(self, code: AuditCode, details: Mapping[int | None, str]) -> int:
        audit.write(self.connection, code, details, worker_id=self.worker_id)
        self._uncommitted[code] += len(details)
        return len(details)

    def _commit(self) -> None:
        """Commit, and count what was audited. Nothing is counted if the commit fails."""
        audited, self._uncommitted = self._uncommitted, Counter()
        self.connection.commit()
        for code, how_many in audited.items():
            audit.count(code, how_many)

    def _is_last_attempt(self, event: ClaimedEvent) -> bool:
        return event.attempt_count + 1 >= self.settings.outbox_max_attempts

    def _wait_ms(self, event: ClaimedEvent, retry_after_seconds: float | None) -> float:
        wait = backoff_ms(
            event.attempt_count + 1,
            base_ms=self.settings.outbox_retry_base_backoff_ms,
            cap_ms=self.settings.outbox_retry_max_backoff_ms,
            jitter=self.settings.outbox_retry_jitter,
        )
        return max(wait, (retry_after_seconds or 0) * 1000)


def _observe(events: Sequence[ClaimedEvent], seconds: float) -> None:
    """Record the time of one publish in the metrics of this program, whatever its results are."""
    metrics.PUBLISH_SECONDS.labels(events[0].destination).observe(seconds)


def _count(
    events: Sequence[ClaimedEvent],
    result: str,
    how_many: int,
    seconds: float | None = None,
    delays: Collection[float] = (),
) -> None:
    """Count events of one destination in the tally. `seconds` is the time of one publish; None: nothing was published.

    `delays` are the times from when each event was due until it was sent.
    """
    if how_many:
        runs = () if seconds is None else (seconds,)
        count(Subject.PUBLISH, result, how_many, queue=events[0].destination, runs=runs, waits=delays)
