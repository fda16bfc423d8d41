"""Events as records of a Kafka topic, each with its own delivery report.

A record's key is the event's `ordering_key`, or else its id: events of one key are in one partition, in their order.
Its value is the payload (JSON), its headers are `event-id` and those of the event (JSON where they are no text). The
external id is TOPIC/PARTITION/OFFSET; there is none for a record that Kafka knows it has and no longer knows where.

Within one `publish` the producer is idempotent: librdkafka sends again what was not confirmed, and Kafka keeps one
copy. That ends with the call: nothing is left in its queues, and a producer that failed at anything is replaced, since
it remembers (a topic that was missing, an address that was down, a sequence that broke). What is sent again by the next
call is a new record, with the same `event-id`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent

logger = logging.getLogger(__name__)
# what librdkafka writes; its FAIL lines, several a second while a broker is away, also come as complaints
librdkafka = logger.getChild("librdkafka")
librdkafka.addFilter(lambda record: not record.getMessage().startswith("FAIL "))

PATIENCE_SECONDS: Final = 3.0
DEFAULTS: Final = {
    "client.id": "celeriac",
    "partitioner": "murmur2_random",  # a key is where the Java clients would put it
    "topic.metadata.propagation.max.ms": "1000",  # a topic that is missing is said to be so within our patience
    "log.connection.close": "false",  # brokers close what is idle
}
NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})

SILENCE: Final = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._AUTHENTICATION,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._PURGE_QUEUE,
    KafkaError._RESOLVE,
    KafkaError._SSL,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
}
NO_TOPIC: Final = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
TOO_LARGE: Final = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
# A broker judges the records that travel together as one: each of them is sent once more by itself.
JUDGED_TOGETHER: Final = {*TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD}
UNACCEPTABLE: Final = JUDGED_TOGETHER - {KafkaError._INVALID_DIFFERENT_RECORD}

# A delivery, its failure, what was decided before it was sent, or None: there was no report.
Report = Message | KafkaError | Refused | NotTried | None
_of_other_processes: Final[list[Producer]] = []


@dataclass(frozen=True, slots=True)
class Record:
    """An event as Kafka gets it."""

    key: bytes
    value: bytes
    headers: dict[str, str | bytes | None]  # as the client has it; ours are bytes

    @classmethod
    def of(cls, event: ClaimedEvent) -> Record:
        headers = {name: value if isinstance(value, str) else _json(value) for name, value in event.headers.items()}
        headers["event-id"] = str(event.id)
        return cls(
            _utf8(event.ordering_key or str(event.id)),
            _utf8(_json(event.payload)),
            {name: _utf8(value) for name, value in headers.items()},
        )


class KafkaPublisher:
    """One topic of one cluster. `options` are librdkafka's; what the contract stands on cannot be changed by them."""

    is_slow: ClassVar[bool] = False

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        *,
        options: Mapping[str, str] = NO_OPTIONS,
        named_by: str = "OUTBOX_DESTINATIONS",
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topic = topic
        self.options = dict(options)
        self.named_by = named_by
        self._producer: Producer | None = None
        self._pid = 0
        self._complaints: deque[KafkaError] = deque(maxlen=32)
        self._fatal: KafkaError | None = None

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            producer = self._open()
        except (KafkaException, TypeError, ValueError) as error:
            return [Failed(self._wrong_option(error))] * len(events)
        records = [Record.of(event) for event in events]
        reports = self._send(producer, records, deadline)
        if len(records) > 1:
            for place, report in enumerate(reports):
                if isinstance(report, KafkaError) and report.code() in JUDGED_TOGETHER:
                    (reports[place],) = self._send(producer, [records[place]], deadline)
        return self._results(reports)

    def close(self) -> None:
        """Nothing that is still under way will be sent any more."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        if self._pid != os.getpid():
            _of_other_processes.append(producer)  # its threads stayed with the parent: to end it here waits for them
            return
        with suppress(KafkaException, SystemError):
            producer.purge()
            producer.close()

    def _open(self) -> Producer:
        """Made by whoever uses it first: a producer does not survive a fork."""
        if "@" in self.bootstrap_servers:
            raise ValueError("with a password, which the client's own errors would repeat")
        if self._producer is None or self._pid != os.getpid():
            self.close()
            self._complaints.clear()
            self._fatal = None
            self._producer = Producer({**DEFAULTS, **self.options, **self._ours()})
            self._pid = os.getpid()
        return self._producer

    def _ours(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "enable.idempotence": "true",
            "acks": "all",
            "message.timeout.ms": str(int(PATIENCE_SECONDS * 1000)),
            "error_cb": self._complaints.append,
            "logger": librdkafka,
        }

    def _send(self, producer: Producer, records: Sequence[Record], deadline: float) -> list[Report]:
        """Waits for all reports while there is time. What has none then goes with the producer."""
        reports: list[Report] = [None] * len(records)
        for place, record in enumerate(records):
            decided = self._produce(producer, record, partial(_write_down, reports, place), deadline)
            if decided is not None:
                reports[place] = decided
        self._listen(producer.flush, deadline - time.monotonic())
        return reports

    def _produce(self, producer: Producer, record: Record, on_delivery: Callable[..., None], deadline: float) -> Report:
        """None: it is under way."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                producer.produce(self.topic, record.value, record.key, on_delivery=on_delivery, headers=record.headers)
            except BufferError:
                self._listen(producer.poll, min(left, 0.1))
            except KafkaException as error:
                failure: KafkaError = error.args[0]
                return Refused(_too_large(failure)) if failure.code() in TOO_LARGE else failure
            except (TypeError, ValueError) as error:
                return Refused(f"Kafka cannot hold it: {error}")
            else:
                return None
        return NotTried()

    def _listen(self, wait: Callable[[float], int], seconds: float) -> None:
        """Serves reports and complaints. What is fatal is raised from here, sometimes in the place of a report."""
        try:
            wait(max(seconds, 0))  # less would be for ever
        except (KafkaException, SystemError) as error:
            cause = error.__cause__ if isinstance(error, SystemError) else error
            if not isinstance(cause, KafkaException):
                raise
            self._fatal = cause.args[0]

    def _results(self, reports: Sequence[Report]) -> list[Result]:
        results = [self._result(report) for report in reports]
        if all(isinstance(result, Sent | Refused) for result in results) and not self._fatal:
            if self._complaints:
                logger.warning("a batch has reached Kafka in spite of this: %s", self._why())
            self._complaints.clear()
            return results
        nobody_answered = all(_is_silence(report) for report in reports if not isinstance(report, Refused))
        self.close()
        if nobody_answered and not self._fatal:
            raise DestinationDown(f"Kafka does not answer: {self._why()}")
        return results

    def _result(self, report: Report) -> Result:
        match report:
            case Refused() | NotTried():
                return report
            case Message():
                offset = report.offset()
                known = offset is not None and offset >= 0
                return Sent(f"{self.topic}/{report.partition()}/{offset}" if known else None)
            case KafkaError() if report.code() in UNACCEPTABLE:
                return Refused(_too_large(report) if report.code() in TOO_LARGE else _said(report))
            case KafkaError() if report.code() in NO_TOPIC:
                return Failed(f"Kafka has no topic {self.topic!r}: create it, or correct {self.named_by}.")
            case KafkaError() if self._fatal is None and report.code() not in SILENCE:
                return Failed(_said(report))
        return Failed(f"Kafka has not confirmed it: {self._why()}")

    def _why(self) -> str:
        reasons = [one for one in self._complaints if one.code() != KafkaError._ALL_BROKERS_DOWN]
        if self._fatal:
            return _said(self._fatal)
        return _said(reasons[-1]) if reasons else f"no answer within {PATIENCE_SECONDS:g} s"

    def _wrong_option(self, error: Exception) -> str:
        """librdkafka's own words repeat the value, which may be a password."""
        if "@" in self.bootstrap_servers:
            return "A Kafka address holds no user: give sasl.username and sasl.password as options."
        named = [name for name in self.options if name in str(error)] or sorted(self.options)
        return f"Kafka's client does not take its options: look at {', '.join(named) or 'the address'}."


def _write_down(reports: list[Report], place: int, error: KafkaError | None, message: Message) -> None:
    reports[place] = message if error is None else error


def _is_silence(report: Report) -> bool:
    return report.code() in SILENCE if isinstance(report, KafkaError) else report is None or report == NotTried()


def _said(error: KafkaError) -> str:
    return f"{error.name()}: {error.str()}"


def _too_large(error: KafkaError) -> str:
    return f"It is larger than message.max.bytes here, or than the topic takes ({error.name()})."


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _utf8(text: str) -> bytes:
    """Half of a surrogate pair has no UTF-8; its escape is what JSON has for it."""
    return text.encode("utf-8", "backslashreplace")
