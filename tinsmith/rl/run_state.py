"""What a run must know to go on: recorded after its checkpoints, replaced as a whole, read by `tinsmith rl` and `tinsmith eval`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import ConfigError

FILE = "state.json"


@dataclass(frozen=True)
class RunState:
    """A run after `step` steps."""

    step: int = 0
    next_group: int = 0
    """Number of the first group that has not been trained on."""
    weights: str = ""
    """Training checkpoint (tinker://...), with the optimizer."""
    sampler_weights: str = ""
    """The same weights to sample from."""
    best_reward: float | None = None
    best_step: int = 0
    best_weights: str = ""
    """The weights with the best reward, to sample from."""
    kept: tuple[str, ...] = ()
    """Checkpoints of steps that are on the server, oldest first: two for each step, those above included."""
    tokenizer: str = ""
    """Directory or Hub id."""

    @property
    def paths(self) -> frozenset[str]:
        """Every checkpoint that the state refers to."""
        return frozenset({self.weights, self.sampler_weights, self.best_weights, *self.kept} - {""})

    def save(self, directory: Path) -> None:
        """Replace the state in `directory`."""
        new = directory / f"{FILE}.new"
        new.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        new.replace(directory / FILE)


def load_state(directory: Path) -> RunState | None:
    """The state in `directory`, or None. Raises ConfigError if it is broken or was written by another version."""
    file = directory / FILE
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}, the state of a run, is broken: {error}; restore it, or name another output directory") from error
    known = {spec.name for spec in dataclasses.fields(RunState)}
    if not isinstance(values, dict) or set(values) != known:
        raise ConfigError(f"{file} was written by another version: its keys are {sorted(values)}, expected {sorted(known)}")
    return RunState(**{**values, "kept": tuple(values["kept"])})
