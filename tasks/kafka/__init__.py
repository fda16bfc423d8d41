"""INGEST_QUEUE=kafka: rings come from a topic, and `manage.py kafka-worker` runs what they name. See docs/kafka.md."""
