"""INGEST_QUEUE=kafka: wake-ups come from a topic, and `manage.py kafka-worker` runs what they name. See docs/kafka.md."""
