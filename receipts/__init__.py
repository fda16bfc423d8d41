"""Receipts: `accepted` as soon as a message is durable in Redis, `saved` when it is in the ledger.

`streams/` consumes Redis Streams; savers and deliverers are such consumers.
"""
