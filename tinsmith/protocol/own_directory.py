"""A process's directory for its sockets or what its vLLM servers read, and those left beside it by dead processes.

Containers may share the place (`/dev/shm`), and machines one on NFS (TMPDIR, --vllm-dir), so a process id says nothing.
Each directory is named by the start of the machine's kernel (its boot id), and holds a file that its process locks to
its end, however it ends. All processes of this kernel see the lock, in whatever container; those of others may not.
Therefore:

- what this kernel has started and nobody locks is deleted;
- what another machine has made, or this one before it was last started, is never deleted. The log names the place.
"""

import fcntl
import logging
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

OWNER = "owner"
"""The file that the process locks. It says for a person which one that is."""
_BEING_MADE = ".tinsmith-new-"
"""Prefix of a directory until its file is locked, so that nobody takes it for a leftover."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OwnDirectory:
    """A new directory that only the user can enter, until `close` or the end of the process."""

    def __init__(self, prefix: str, parent: Path) -> None:
        """Its name begins with `prefix`.

        What dead processes have left in `parent` under such a name is deleted first.
        """
        boot = boot_name()
        _delete_leftovers(prefix, parent, boot)
        made = Path(tempfile.mkdtemp(prefix=_BEING_MADE, dir=parent))
        self._lock = os.open(made / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        os.write(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        # A name without a boot id is nobody's leftover: where files cannot be locked, nobody can tell that it is used.
        named = f"{boot}-" if boot and _locked(self._lock) else ""
        self.path = made.rename(parent / f"{prefix}{named}{made.name.removeprefix(_BEING_MADE)}")

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # before the file goes: NFS keeps a file that is open, and so the directory
            self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def boot_name() -> str:
    """Return a name for this start of the machine; empty if the system does not tell it from others."""
    with suppress(OSError):
        return "b" + _BOOT_ID.read_text().strip().replace("-", "")[:12]
    return ""


def _delete_leftovers(prefix: str, parent: Path, boot: str) -> None:
    others = 0
    for directory in parent.glob(f"{prefix}*"):
        if not boot or not directory.name.startswith(f"{prefix}{boot}-"):
            others += 1
        elif _is_left(directory):
            shutil.rmtree(directory, ignore_errors=True)
    if others:
        log.info(
            "%d directories %s* in %s are of other machines, or were made before this one was last started: "
            "they are not deleted. The file %r in each names its process; delete what is used no more",
            *(others, prefix, parent, OWNER),
        )


def _is_left(directory: Path) -> bool:
    """Whether nobody uses a directory that this start of the machine has made."""
    try:
        with (directory / OWNER).open("rb+") as file:
            return _locked(file.fileno())  # closed, it is not locked again: each process makes a directory of its own
    except FileNotFoundError:  # it was there before the directory got its name: somebody has begun to delete all of it
        return True
    except OSError:  # of another user
        return False


def _locked(file: int) -> bool:
    """Lock a file; returns whether that was possible."""
    with suppress(OSError):  # another process has it, or the file system has no locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
