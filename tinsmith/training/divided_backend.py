"""Training on a base model whose layers are divided over the workers: every worker takes part in every pass of any of them.

A pass of all workers is a number of attempts. Before each, every worker says whether it has something to compute; it has not when its share
is empty, or computed while that of another ran out of memory and goes on in halves. Then all put the layers together for those who
have (`divided_layers.py`), until none has. What one computes, and what fails there, is its own: others need its part of the layers alone.
"""

import zlib
from collections.abc import Sequence

from tinsmith.config import TrainingConfig
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import DeviceLostError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort, pass_memory_of
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend, PassError, PassResult
from tinsmith.training.checkpoint import SavedState
from tinsmith.training.divided_decoder import DividedDecoder


class DividedBackend(LocalBackend):
    """The `Backend` of one of several workers that share the layers of the base."""

    needs_all = True

    def __init__(self, base: BaseModel, config: TrainingConfig, group: ProcessGroup) -> None:
        """`base` is one that `divided_decoder.divide` has divided over `group`."""
        super().__init__(base, config, group)
        if not isinstance(base.decoder, DividedDecoder):
            raise TypeError(f"the layers of {base.name} are not divided")
        self.together = group
        self.layers = base.decoder.divided
        self.efforts.memory = pass_memory_of(base.layout, base.text_config, base.dtype, divided=True)

    def create_model(self, model_id: str, shape: LoraShape) -> None:
        require_lora(self.base, shape)
        super().create_model(model_id, shape)

    def _load(self, model_id: str, state: SavedState) -> None:
        require_lora(self.base, state.about.shape)
        super()._load(model_id, state)

    def run_pass(self, work: Sequence[DatumWork], backward: bool) -> PassResult:
        """As `LocalBackend.run_pass`. To be called by all workers, also by those that have no work."""
        what = zlib.crc32(f"{'forward_backward' if backward else 'forward'} on {self.base.name}".encode())
        self.together.agree(what, "the pass that comes next")
        try:
            result = super().run_pass(work, backward)
        except DeviceLostError:
            raise
        except Exception as error:  # the others are in the middle of the pass, and would wait for this one
            raise DeviceLostError(f"{self.together.place.name} failed within a pass of all workers: {error!r}") from error
        while any(self.together.gather(False)):
            self.layers.begin(backward)
            self.layers.finish()
        return result

    def _attempt(self, work: Sequence[DatumWork], backward: bool, effort: Effort) -> list[DatumResult] | PassError:
        self.together.gather(True)
        self.layers.begin(backward)
        outcome = super()._attempt(work, backward, effort)
        self.layers.finish()
        return outcome


def require_lora(base: BaseModel, shape: LoraShape) -> None:
    """Raise UserError for training of all parameters."""
    if shape.rank == 0:
        raise UserError(
            f"the server divides the weights of {base.name} over its workers (--shard weights), which trains LoRA only: create the model "
            "with a lora_config.rank of 1 or more, or serve with --shard none"
        )
