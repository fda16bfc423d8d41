"""Breaking it on purpose, on servers of its own, and counting what is left."""
