"""One module for each revision. Its number is the schema version that it leads to.

The first schema had no revision: version 1 is Alembic's "base".
"""
