"""Weights as vLLM servers take them: adapters as PEFT folders, which stay as long as the weights, and full weights by checkpoint name.

The files lie in memory where the system has a file system for that. Every version has a directory of its own: vLLM takes what it computed
under an adapter's name and path for good.
"""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import psutil
import torch
from torch import Tensor

from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.inside_vllm.identity import Identity
from tinsmith.training.peft_format import write_peft

_MEMORY = Path("/dev/shm")
_PREFIX = "tinsmith-weights-"


class WeightFiles:
    """The files of one base model's weights. Used from several threads."""

    def __init__(self, base: BaseModel, directory: str) -> None:
        """Files go below `directory`; an empty text takes one in memory. What engines that died have left there is deleted."""
        self.base = base
        # Taken now: a pass with full weights puts these into the base's place while it runs, in another thread than ours.
        self.parameters = base.full_targets(LoraShape(rank=0, seed=0))
        parent = Path(directory or (_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()))
        _delete_leftovers(parent)
        self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self._count = itertools.count(1)

    def write(self, adapter: Adapter) -> Path:
        """The directory of an adapter that was just written. It is another one at each call."""
        directory = self.root / str(next(self._count))
        write_peft(adapter, self.base.layout, self.base.tokenizer_id, directory)
        return directory

    @torch.no_grad()
    def identity(self, adapter: Adapter) -> str:
        """The identity of an adapter as vLLM's layers hold it: in the dtype of the base, B multiplied by the scale."""
        whole = Identity()
        for name, pair in adapter.working.items():
            module = self.base.layout.module_name(name)
            whole.add(f"{module}.a", pair.a)
            whole.add(f"{module}.b", pair.b * adapter.scale)
        return str(whole)

    def tensors(self, weights: FullWeights | None) -> dict[str, Tensor]:
        """What full-parameter training can change, by checkpoint name: of `weights` what they have, of the base the rest. No copies."""
        own = weights.working if weights is not None else {}
        return {self.base.layout.parameter_name(name): own.get(name, parameter) for name, parameter in self.parameters.items()}

    def remove(self, directory: Path) -> None:
        """Delete the files of an adapter."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def _delete_leftovers(parent: Path) -> None:
    """Delete the directories of processes that have ended. One whose name has no process id is not ours."""
    for directory in parent.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)
