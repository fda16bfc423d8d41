"""The ledger: its tables, its states, its errors, its clock, and the way to reach and to migrate it.

Import from the module that has the name. `models.tables` is all tables at once; a command that needs no table imports
none, and answers before SQLAlchemy would be loaded.
"""
