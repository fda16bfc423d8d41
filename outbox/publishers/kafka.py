"""Publish events as records of a Kafka topic. Each record has its own delivery report.

The key of a record is the event's `ordering_key`, or else its id: events of one key are in one partition, in their
order. The value is the payload (JSON). The headers are `event-id` and those of the event (JSON unless they are text).
The external id is TOPIC/PARTITION/OFFSET; it is missing if Kafka recognises a record as a duplicate but does not say
where it is.

Within one `publish` the producer is idempotent: librdkafka sends again what was not confirmed, and Kafka keeps one
copy. This ends with the call: nothing stays in the producer's queues. A producer that failed at anything is replaced,
because it remembers a missing topic, an address that was down, or a broken sequence. If a later call sends the event
again, it is a new record with the same `event-id`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox.lease import ClaimedEvent
from outbox.publishers import contract
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent, json_bytes

logger = logging.getLogger(__name__)
# The log of librdkafka. Its FAIL lines, several per second while a broker is unreachable, also come as complaints.
librdkafka = logger.getChild("librdkafka")
librdkafka.addFilter(lambda record: not record.getMessage().startswith("FAIL "))

DEFAULTS: Final = {
    "client.id": "celeriac",
    "partitioner": "murmur2_random",  # the same partitions as the Java clients
    "topic.metadata.propagation.max.ms": "1000",  # report a missing topic within PATIENCE_SECONDS
    "log.connection.close": "false",  # brokers close idle connections
}

_SILENCE: Final = (
    "ALL_BROKERS_DOWN AUTHENTICATION MSG_TIMED_OUT PURGE_INFLIGHT PURGE_QUEUE RESOLVE SSL TIMED_OUT TIMED_OUT_QUEUE "
    "TRANSPORT"
)
SILENCE: Final = {getattr(KafkaError, f"_{name}") for name in _SILENCE.split()}
NO_TOPIC: Final = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
TOO_LARGE: Final = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
# A broker judges all records of a request together. Each of them is then sent once more in a request of its own.
JUDGED_TOGETHER: Final = {*TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD}
UNACCEPTABLE: Final = JUDGED_TOGETHER - {KafkaError._INVALID_DIFFERENT_RECORD}

# A delivery, its failure, a decision made before it was sent, or None if there was no report.
Report = Message | KafkaError | Refused | NotTried | None
Record = dict[str, Any]  # the arguments of Producer.produce
_of_other_processes: Final[list[Producer]] = []


@dataclass(repr=False, eq=False)
class KafkaPublisher:
    """Publish to one topic. `options` are librdkafka's; they cannot change those that the contract depends on."""

    is_slow: ClassVar[bool] = False

    bootstrap_servers: str
    topic: str
    _: KW_ONLY
    options: Mapping[str, str] = field(default_factory=dict)
    named_by: str = "OUTBOX_DESTINATIONS"
    _producer: Producer | None = None
    _pid: int = 0
    _complaints: deque[KafkaError] = field(default_factory=lambda: deque(maxlen=32))
    _fatal: KafkaError | None = None

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        deadline = time.monotonic() + contract.PATIENCE_SECONDS
        try:
            producer = self._open()
        except (KafkaException, TypeError, ValueError) as error:
            return [Failed(self._wrong_option(error))] * len(events)
        records = [_record(event) for event in events]
        reports = self._send(producer, records, deadline)
        if len(records) > 1:
            for place, report in enumerate(reports):
                if isinstance(report, KafkaError) and report.code() in JUDGED_TOGETHER:
                    (reports[place],) = self._send(producer, [records[place]], deadline)
        return self._results(reports)

    def close(self) -> None:
        """Close the producer. Records that are still in its queues are not sent."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        if self._pid != os.getpid():
            _of_other_processes.append(producer)  # its threads stayed in the parent: closing it would wait for them
            return
        with suppress(KafkaException, SystemError):
            producer.purge()
            producer.close()

    def _open(self) -> Producer:
        """Return a producer of this process: a producer does not survive a fork."""
        if "@" in self.bootstrap_servers:
            raise ValueError("with a password, which the client's own errors would repeat")
        if self._producer is None or self._pid != os.getpid():
            self.close()
            self._complaints.clear()
            self._fatal = None
            ours = {
                "bootstrap.servers": self.bootstrap_servers,
                "enable.idempotence": "true",
                "acks": "all",
                "message.timeout.ms": str(int(contract.PATIENCE_SECONDS * 1000)),
                "error_cb": self._complaints.append,
                "logger": librdkafka,
            }
            self._producer = Producer({**DEFAULTS, **self.options, **ours})
            self._pid = os.getpid()
        return self._producer

    def _send(self, producer: Producer, records: Sequence[Record], deadline: float) -> list[Report]:
        """Send records and wait for their reports until the deadline."""
        reports: list[Report] = [None] * len(records)
        for place, record in enumerate(records):
            decided = self._produce(producer, record, partial(_write_down, reports, place), deadline)
            if decided is not None:
                reports[place] = decided
        self._listen(producer.flush, deadline - time.monotonic())
        return reports

    def _produce(self, producer: Producer, record: Record, on_delivery: Callable[..., None], deadline: float) -> Report:
        """Put a record into the producer's queue. Return None if its report will come."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                producer.produce(self.topic, **record, on_delivery=on_delivery)
            except BufferError:
                self._listen(producer.poll, min(left, 0.1))
            except KafkaException as error:
                failure: KafkaError = error.args[0]
                return Refused(_too_large(failure)) if failure.code() in TOO_LARGE else failure
            except (TypeError, ValueError) as error:
                return Refused(f"Kafka cannot store it: {error}")
            else:
                return None
        return NotTried()

    def _listen(self, wait: Callable[[float], int], seconds: float) -> None:
        """Process reports and complaints. A fatal error is raised here, sometimes instead of a report."""
        try:
            wait(max(seconds, 0))  # a negative time would mean for ever
        except (KafkaException, SystemError) as error:
            cause = error.__cause__ if isinstance(error, SystemError) else error
            if not isinstance(cause, KafkaException):
                raise
            self._fatal = cause.args[0]

    def _results(self, reports: Sequence[Report]) -> list[Result]:
        results = [self._result(report) for report in reports]
        if all(isinstance(result, Sent | Refused) for result in results) and not self._fatal:
            if self._complaints:
                logger.warning(
                    "A batch was sent to Kafka despite this error: %s",
                    self._why(),
                    extra={"event": "kafka_sent_despite_error"},
                )
            self._complaints.clear()
            return results
        is_unreachable = all(_is_silence(report) for report in reports if not isinstance(report, Refused))
        self.close()
        if is_unreachable and not self._fatal:
            raise DestinationDown(f"Kafka is unreachable: {self._why()}")
        return results

    def _result(self, report: Report) -> Result:
        match report:
            case Refused() | NotTried():
                return report
            case Message():
                offset = report.offset()
                is_known = offset is not None and offset >= 0
                return Sent(f"{self.topic}/{report.partition()}/{offset}" if is_known else None)
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
        return _said(reasons[-1]) if reasons else f"no answer within {contract.PATIENCE_SECONDS:g} s"

    def _wrong_option(self, error: Exception) -> str:
        """Name the option without its value, which may be secret and is part of librdkafka's own message."""
        if "@" in self.bootstrap_servers:
            return "A Kafka address contains no user: give sasl.username and sasl.password as options."
        named = [name for name in self.options if name in str(error)] or sorted(self.options)
        return f"The Kafka client rejects its options: correct {', '.join(named) or 'the address'}."


def _record(event: ClaimedEvent) -> Record:
    headers = {**event.headers, "event-id": str(event.id)}
    return {
        "key": (event.ordering_key or str(event.id)).encode("utf-8", "backslashreplace"),
        "value": json_bytes(event.payload),
        "headers": {
            name: value.encode("utf-8", "backslashreplace") if isinstance(value, str) else json_bytes(value)
            for name, value in headers.items()
        },
    }


def _write_down(reports: list[Report], place: int, error: KafkaError | None, message: Message) -> None:
    reports[place] = message if error is None else error


def _is_silence(report: Report) -> bool:
    return report.code() in SILENCE if isinstance(report, KafkaError) else report is None or report == NotTried()


def _said(error: KafkaError) -> str:
    return f"{error.name()}: {error.str()}"


def _too_large(error: KafkaError) -> str:
    return f"It is larger than message.max.bytes here, or than the topic allows ({error.name()})."
