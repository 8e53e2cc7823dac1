"""The first schema that was released: `store/schema.py` makes it. The next revision names it as its `down_revision`."""

revision = "5"
down_revision = None


def upgrade() -> None:
    """Not run: no database is older."""
