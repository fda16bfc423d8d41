"""Real servers and the parts of Celeriac, started on a bare machine; the default when nothing is configured."""
