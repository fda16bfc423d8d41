"""The systems of `bench ingest`, a program each: `python -m bench.peers.NAME submit COUNT` and `… work WIDTH PLACE`.

All of them do the same work (`effect.py`) with two processes. The foreign ones run with the Python of `.venv-bench`, so
that none of their packages is ever imported into ours; they import nothing of Celeriac but `effect.py`, which needs
only the standard library. Each is set up as its own documentation recommends for work that must not be lost.
"""
