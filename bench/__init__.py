"""Benchmarks: compare Celeriac with other systems and with bare SQL in one run on one machine, as ratios."""
