"""Writes external weights: a PEFT adapter, or a whole transformers model if all of it was trained.

With recipients every file is encrypted with age (age-encryption.org) and named `.age`; nothing in plain text stays
behind.

`python -m tinsmith.worker.exports STATE DIRECTORY` writes a transformers model of the full weights whose checkpoint
lies in STATE.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyrage

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.full import FullWeights
from tinsmith.models.layout import Layout, read_layout
from tinsmith.store.files import WRITING_PREFIX
from tinsmith.training.checkpoint import SavedState, read_about, stored_weights, weights_on_host, write_state
from tinsmith.training.peft_format import write_download, write_merged

_SHOWN_CHARACTERS = 20


def parse_recipients(texts: Sequence[str]) -> list[Any]:
    """Parse age recipients: native keys (age1...) and SSH public keys. Raises UserError naming one that is neither."""
    recipients = []
    for place, text in enumerate(texts):
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            # Not all of it: it may be the secret key.
            shown = text[:_SHOWN_CHARACTERS] + ("..." if len(text) > _SHOWN_CHARACTERS else "")
            raise UserError(
                f"age_encryption_recipients.{place}: {shown!r} is no age1... key and no SSH public key: {error}"
            ) from error
    return recipients


def write_external(state: SavedState, layout: Layout, directory: Path, recipients: Sequence[Any]) -> None:
    """Write the files of a model's copied state to `directory`, made if missing; `layout` is that of the base.

    Any thread may do this.
    """
    _write_encrypted(partial(_write_plain, state, layout), directory, recipients)


def export_files(written: Path, directory: Path, recipients: Sequence[Any]) -> None:
    """Write external weights of a rank-0 model whose checkpoint has been written."""
    _write_encrypted(partial(merge, written), directory, recipients)


def _write_encrypted(write: Callable[[Path], None], directory: Path, recipients: Sequence[Any]) -> None:
    """Let `write` fill a directory, whose files come to `directory`."""
    directory.mkdir(exist_ok=True)
    with _scratch(directory) as plain:
        write(plain if recipients else directory)
        for file in [file for file in plain.rglob("*") if file.is_file()]:
            encrypted = directory / f"{file.relative_to(plain)}.age"
            encrypted.parent.mkdir(parents=True, exist_ok=True)
            encrypt(file, encrypted, recipients)


def encrypt(plain: Path, encrypted: Path, recipients: Sequence[Any]) -> None:
    """Encrypt a file in blocks: `pyrage.encrypt_file` blocks all threads, and the server would miss heartbeats."""
    with plain.open("rb") as source, encrypted.open("wb") as target:
        pyrage.encrypt_io(source, target, recipients)


def _write_plain(state: SavedState, layout: Layout, directory: Path) -> None:
    about = state.about
    weights = weights_on_host(state)
    if isinstance(weights, FullWeights):
        with _scratch(directory) as written:
            write_state(state, written)
            merge(written, directory)
    else:
        write_download(weights, layout, about.base_source, about.public_base, directory)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yield a scratch directory inside of `directory`, with which it is deleted if this process dies."""
    with tempfile.TemporaryDirectory(prefix=WRITING_PREFIX, dir=directory) as scratch:
        yield Path(scratch)


def merge(state: Path, directory: Path) -> None:
    """Write the model in a process of its own, and wait for that.

    Raises TinsmithError with the last line of what it says.

    While transformers builds a network it sets torch's default dtype, and replaces functions of torch, for the whole
    process: what the device's thread made meanwhile would be of the wrong precision, and after two builds at once it
    would stay so.
    """
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tinsmith.worker.exports", str(state), str(directory)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise TinsmithError(f"the transformers model could not be written: {said[-1]}; see to that and save again")


def main() -> None:
    """Read the checkpoint, and write the model."""
    state, directory = Path(sys.argv[1]), Path(sys.argv[2])
    about = read_about(state)
    write_merged(stored_weights(state, about), read_layout(about.base_source), about.base_source, directory)


if __name__ == "__main__":
    main()
