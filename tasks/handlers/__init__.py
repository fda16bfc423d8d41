"""The handlers that ship with Celeriac, one file each."""
