"""The systems of `bench ingest`, one program each: `python -m bench.peers.NAME submit COUNT` and `… work WIDTH PLACE`.

All do the same work (`effect.py`) with two processes. Foreign systems run with the Python of `.venv-bench`, so that
their packages are never imported into ours; of Celeriac they import only `effect.py`, which needs only the standard
library. Each is configured as its own documentation recommends for work that must not be lost.
"""
