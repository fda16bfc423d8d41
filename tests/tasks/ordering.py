"""Submit tasks with partition keys, and check that their effects happened once and in order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

from sqlalchemy import text

from models.engine import engine, sessions
from tasks import NewTask, submit_many
from tests.tasks.order_handlers import KINDS
from tests.tasks.work import rows

FOUND = text("SELECT task_id, key, seq FROM public.test_order ORDER BY n")


def submit_all(dice: random.Random, *, tasks: int, keys: int) -> None:
    """Submit tasks of both kinds in one transaction. One in ten fails the first time."""
    new = [
        NewTask(
            dice.choice(KINDS),
            {"n": n, "fails": int(dice.random() < 0.1)},
            partition_key=f"key {n % keys}",
            max_attempts=50,
        )
        for n in range(tasks)
    ]
    with sessions().begin() as session:
        submit_many(session, new)


def check_order() -> None:
    """Assert that each effect happened once, and in each key in the order of the submits."""
    with engine().begin() as connection:
        found = connection.execute(FOUND).all()
    by_key: dict[str, list[int]] = defaultdict(list)
    for row in found:
        by_key[row.key].append(row.seq)
    assert sum(a >= b for seqs in by_key.values() for a, b in pairwise(seqs)) == 0, "inversions"
    assert Counter(row.task_id for row in found) == dict.fromkeys((id_ for (id_,) in rows("id")), 1)
