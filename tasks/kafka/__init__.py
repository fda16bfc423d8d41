"""INGEST_QUEUE=kafka: wake-ups travel through a Kafka topic to `manage.py kafka-worker`. See docs/kafka.md."""
