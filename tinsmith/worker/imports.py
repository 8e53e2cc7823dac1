"""Makes the files of a checkpoint from a PEFT adapter that a client has uploaded, in a process of its own.

So nothing that is wrong with the files, nor their size, reaches a server or a worker.

`python -m tinsmith.worker.imports` reads an `ImportAsked` in JSON and prints an `ImportMade`.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError, TinsmithError, UserError, translated
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.files import CheckpointFiles

_LONGEST_S = 1800
"""Seconds that an import may take: others wait for its end."""


@dataclass(frozen=True)
class ImportAsked:
    """An adapter, and the checkpoint that is made of it."""

    directory: str
    """The place of the adapter's files."""
    base_source: str
    """Directory or Hub id of the base model."""
    shape: dict[str, Any]
    """The adapter's, as its client described it."""
    data_dir: str
    checkpoint_root: str
    row: dict[str, Any]
    """The checkpoint's, without what only its files tell."""


@dataclass(frozen=True)
class ImportMade:
    """The result of an import: the rest of its checkpoint's row, or the error."""

    row: dict[str, Any] | None
    error: str = ""
    is_user_error: bool = False


def import_upload(asked: ImportAsked) -> Mapping[str, Any]:
    """Write the files of a checkpoint; returns the fields of its row that only they tell.

    Raises UserError for files that are no adapter of this shape on this base, TinsmithError if they cannot be written.
    """
    with translated(
        subprocess.TimeoutExpired,
        TinsmithError,
        lambda _: f"the upload was not read in {_LONGEST_S} s; finish it again when the server has less to do",
    ):
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "tinsmith.worker.imports"],
            check=False,
            input=json.dumps(asdict(asked)),
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise TinsmithError(f"the upload could not be read: {said[-1]}; see to that and finish it again")
    made = ImportMade(**json.loads(ended.stdout))
    if made.row is None:
        raise (UserError if made.is_user_error else TinsmithError)(made.error)
    return made.row


def _made(asked: ImportAsked) -> dict[str, Any]:
    # Here, for the server must not load torch
    from tinsmith.models.layout import read_layout
    from tinsmith.training.checkpoint import About, SavedState, write_state
    from tinsmith.training.peft_format import read_peft
    from tinsmith.worker.checkpoint_files import write_files

    base, wanted = read_layout(asked.base_source), LoraShape(**asked.shape)
    adapter = read_peft(Path(asked.directory), base, asked.base_source, partial(_require, wanted))
    about = About(asked.row["base_model"], asked.base_source, base.family.model_type, wanted, None)
    files = CheckpointFiles(Path(asked.data_dir), asked.checkpoint_root)
    return write_files(files, asked.row, partial(write_state, SavedState(about, adapter.named_tensors())))


def _require(wanted: LoraShape, shape: LoraShape) -> None:
    if found := shape.differences(wanted):
        raise UserError(
            f"lora_config: the files hold an adapter with {found}, and lora_config says {wanted.differences(shape)}; "
            "start again with what the files hold"
        )


def main() -> None:
    """Read what is asked, make it, and print what has become of it."""
    with suppress(OSError):  # if memory runs out, nothing else shall end
        Path("/proc/self/oom_score_adj").write_text("1000")
    asked = ImportAsked(**json.load(sys.stdin))
    try:
        made = ImportMade(_made(asked))
    except TinsmithError as error:
        # The client knows its files and the base model by other names than ours
        told = str(error).replace(f"{asked.directory}/", "").replace(asked.directory, "the upload")
        told = told.replace(asked.base_source, asked.row["base_model"])
        made = ImportMade(None, told, isinstance(error, UserError | ConfigError))
    print(json.dumps(asdict(made)))


if __name__ == "__main__":
    main()
