"""The ledger: its tables, statuses, errors and clock, how to connect to it, and how to migrate it.

Import a name from the module that defines it. `models.tables` imports every table. A command that needs no table
imports none, so that it starts before SQLAlchemy is loaded.
"""
