"""The embedded stack: real servers and the programs of Celeriac on one machine. Used when no server is configured."""
