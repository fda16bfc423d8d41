"""Measures Celeriac beside its peers and the raw limit, in one run on one machine: ratios, not absolute figures."""
