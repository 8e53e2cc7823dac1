"""Alembic revisions: how a database that an older Tinsmith made becomes one of today's schema.

A new database is made from `schema.py` and stamped with the newest revision, so revisions only ever run on databases
that exist already.
"""
