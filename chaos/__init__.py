"""Break the system on purpose, on servers of its own, and count the effects."""
