"""Runs the revisions on the connection that `database.py` has opened, inside of its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
