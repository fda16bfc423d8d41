"""Why a message gets no receipt `accepted`."""

from __future__ import annotations

from models.errors import CeleriacError, Misuse, Unreachable


class ReceiptLogUnreachable(Unreachable):
    """The receipt log is unreachable: nothing can be accepted, and nothing was written.

    The Redis of REDIS_URL is stopped, restarting, a replica, or not at the configured address.
    """

    code = "receipt_log_unreachable"
    remedy = "Start that Redis or correct REDIS_URL; `manage.py check` shows which. Then repeat the request."


class NotDurable(ReceiptLogUnreachable):
    """The Redis behind receipts may lose what it has answered, so nothing is accepted.

    It does not write its append-only file to disk before each answer (appendonly yes, appendfsync always), it may
    evict keys, it is a cluster, or its configuration cannot be read.
    """

    code = "receipt_log_not_durable"
    remedy = "Configure that Redis as the message says. `manage.py check` shows all of its settings."


class ServerBusy(CeleriacError):
    """The receipt log is unreachable, and RECEIPT_FAIL_OPEN is off: the message was not accepted.

    Redis is down or not durable, and the installation prefers an error over a receipt without order.
    """

    code = "server_busy"
    remedy = "Repeat the request later with the same id; nothing is saved twice."
    http_status = 503


class ReceiptsFull(CeleriacError):
    """Too many accepted messages wait to be saved; try again later.

    The saver does not keep up, or PostgreSQL is down: a stream has RECEIPT_STREAM_LIMIT entries, or the memory of that
    Redis is nearly used up.
    """

    code = "receipts_full"
    remedy = "Repeat the request after the seconds in Retry-After. `manage.py receipts` shows what is waiting."
    http_status = 429


class EnvelopeTooLarge(Misuse):
    """The message is too large for a receipt `accepted`.

    An entry of the receipt log may have RECEIPT_MAX_BYTES bytes.
    """

    code = "envelope_too_large"
    remedy = "Send it without `receipt=accepted`, so that it goes straight into the ledger, or raise RECEIPT_MAX_BYTES."
    http_status = 413


class ContentRejected(Misuse):
    """The text contains a word that is not allowed.

    RECEIPT_BANNED_WORDS lists the word. Nothing was written.
    """

    code = "content_rejected"
    remedy = "Remove the word."
    http_status = 422


class UnknownReceipt(CeleriacError):
    """There is no receipt with this id.

    Nothing was accepted or saved with a receipt under this id, the token may not see it, or it was pruned.
    """

    code = "unknown_receipt"
    remedy = "Check the id. A task that was submitted without `receipt=` has no receipt; read it at /api/tasks/{id}."
    http_status = 404
