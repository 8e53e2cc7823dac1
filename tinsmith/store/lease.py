"""Gives each engine its number (`fence.py`)."""

import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import delete, func, select

from tinsmith.errors import ConfigError, EngineUnavailableError, translated
from tinsmith.store.database import Transactions
from tinsmith.store.schema import lease

_STARTED = datetime.now(UTC).isoformat(sep=" ", timespec="milliseconds")
"""In containers of one name, whose processes have the same number, it tells two servers apart."""


def take_lease(store: Transactions, data_dir: str) -> int:
    """The number of the engine that is to be started. Nothing that an earlier one writes is taken any more.

    From now on `store` writes for that engine. Raises ConfigError if another server has the database, or has had it
    since this one took it.
    """
    store.hold()
    place = f"process {os.getpid()}, started {_STARTED}, data directory {Path(data_dir).absolute()}"
    holder = f"the server on {socket.gethostname()} ({place})"
    with store.reading() as connection:
        ours = connection.execute(select(lease.c.number).where(lease.c.holder == holder)).scalar()
    if ours is not None:  # perhaps of a commit that could not say whether it was done
        store.write_for(ours)
    remedy = "start this server again once no other uses the database"
    with (
        translated(EngineUnavailableError, ConfigError, lambda error: f"{error}; {remedy}"),
        store.writing_if_there() as connection,
    ):
        number = (connection.execute(select(func.max(lease.c.number))).scalar() or 0) + 1
        connection.execute(delete(lease))
        connection.execute(lease.insert(), {"number": number, "holder": holder, "taken_at": time.time()})
    store.write_for(number)
    return number
