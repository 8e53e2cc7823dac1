"""Refuses transactions of an engine, and of its server, once another has taken the database over.

An engine may live on when its server is dead, or hang and wake up later. Each gets a number, the highest so far, before
it starts; every transaction in which it writes looks whether that is still the newest. Writing transactions follow one
another, so none of an earlier engine commits after the number has changed.
"""

from typing import Any

from tinsmith.errors import EngineUnavailableError

BUSY_S = 30.0
"""Longest wait for the lock of a database, in seconds."""

NEWEST = "SELECT number, holder FROM lease"


def require_own(number: int, newest: Any, name: str) -> None:
    """Raise EngineUnavailableError if another engine than that of this number may write to the database `name`.

    `newest` is the row that `NEWEST` finds in the transaction, None if there is none.
    """
    if newest is None or newest[0] != number:
        holder = "nobody" if newest is None else f"{newest[1]}, which has started engine {newest[0]}"
        raise EngineUnavailableError(
            f"{name} belongs to {holder}, and this is engine {number}: one of the two servers has to be stopped"
        )
