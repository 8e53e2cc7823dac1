"""`python -m tinsmith.worker.merge STATE DIRECTORY`: write a transformers model of the full weights whose checkpoint lies in STATE.

A process of its own, because transformers sets torch's default dtype, and replaces functions of torch, for the whole process while it
builds a network: what the device's thread made meanwhile would be of the wrong precision, and after two builds at once it would stay so.
"""

import subprocess
import sys
from pathlib import Path

from tinsmith.errors import TinsmithError


def merge(state: Path, directory: Path) -> None:
    """Write the model in a process of its own, and wait for that. Raises TinsmithError with the last line of what it says."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tinsmith.worker.merge", str(state), str(directory)],
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
    from tinsmith.models.layout import read_layout
    from tinsmith.training.checkpoint import read_about, stored_weights
    from tinsmith.training.peft_format import write_merged

    state, directory = Path(sys.argv[1]), Path(sys.argv[2])
    about = read_about(state)
    write_merged(stored_weights(state, about), read_layout(about.base_source), about.base_source, directory)


if __name__ == "__main__":
    main()
