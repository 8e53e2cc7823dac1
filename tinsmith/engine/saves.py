"""Saves that are written and recorded while their model goes on, because its state is already copied.

    Copied -> the worker writes the files -> Answer -> the row, once the database takes it -> the save has ended

Each model has one at most, because a copy takes as much memory as the model: its next save waits in the queue for the end of this one. So
two saves of one path come one after the other too.
"""

from collections.abc import Mapping

from tinsmith.engine.operations import LoadedModel
from tinsmith.engine.running import Running


class Saves:
    """Those of all models."""

    def __init__(self) -> None:
        self.writing: dict[str, Running] = {}
        """Saves that are being written, by model."""
        self.next: set[str] = set()
        """Models whose next command is a save too, and waits."""

    @property
    def unrecorded(self) -> list[Running]:
        """Those whose files are there and whose rows the database has not taken yet."""
        return [saving for saving in self.writing.values() if saving.in_call is None]

    def begin(self, saving: Running, state: int) -> None:
        """The copy of a model's state is there."""
        saving.copied_state = state
        self.writing[saving.model_id] = saving

    def forget(self, model_id: str) -> None:
        """The model's save has ended, or nobody waits for it any more."""
        self.writing.pop(model_id, None)
        self.next.discard(model_id)

    def cut_short(self, models: Mapping[str, LoadedModel]) -> tuple[list[Running], list[Running]]:
        """The workers have ended: what they wrote is gone. Returns the saves that can begin anew, and those that cannot.

        A model comes back as its last step has left it. If that is the state that was copied, the same is saved again; if not, nothing is
        left of what was to be saved. Those that only wait for their rows go on.
        """
        cut = [saving for saving in self.writing.values() if saving.in_call is not None]
        anew = [saving for saving in cut if saving.model_id in models and models[saving.model_id].state == saving.copied_state]
        for saving in cut:
            self.forget(saving.model_id)
        self.next.clear()
        return anew, [saving for saving in cut if saving.model_id in models and saving not in anew]
