"""The door over HTTP."""
