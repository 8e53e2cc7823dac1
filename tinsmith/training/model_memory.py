"""Memory of one base's models on device and host: what is refused, what is promised, and what gives way."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf

import torch

from tinsmith.config import TrainingConfig
from tinsmith.errors import UserError
from tinsmith.memory.budget import ModelBytes, full_bytes, full_state, lora_bytes
from tinsmith.memory.pass_memory import pass_memory_of
from tinsmith.models.base import BaseModel
from tinsmith.models.machine import free_memory, require_memory
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.captured_pass import CapturedPasses
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.paged_state import StatePager


class ModelMemory:
    """Memory of the models in `optimizers`, and of the graphs of their passes, which give way to everything else."""

    def __init__(self, base: BaseModel, config: TrainingConfig, optimizers: Mapping[str, Optimizer]) -> None:
        self.base = base
        self.optimizers = optimizers
        self.full_state = full_state(config)
        self.captured = CapturedPasses(
            base, pass_memory_of(base.layout, base.text_config, base.dtype), config.logits_chunk
        )
        self.pager = StatePager(base.device)
        """What moves LoRA models of all bases of the device; this one moves none."""
        self.host_share = inf
        """Bytes of the host's memory for what models of all bases keep there (--full-state compact-host)."""
        self.beside: Sequence[ModelMemory] = [self]
        """That of all bases of this process."""

    def share_host(self, share: int, beside: "Sequence[ModelMemory]") -> None:
        """Let models of all bases keep at most `share` bytes in the host's memory.

        All workers have the same models and share, so all refuse a model or none, whatever is free at the moment.
        """
        self.host_share, self.beside = share, beside

    def require(self, purpose: str, needed: int, device: torch.device) -> None:
        """Raise UserError if `device` lacks `needed` bytes beside what its models will still take when they train."""
        if device == self.base.device and needed > free_memory(device) - self.promised():
            if self.captured.held:
                self.give_back()
            self.pager.make_way(needed)
        require_memory(purpose, needed, device, self.promised() if device == self.base.device else 0)

    def require_to_train(self, shape: LoraShape) -> None:
        """Raise UserError if all weights of the base do not fit once more, as `shape` says."""
        parameters = sum(parameter.numel() for parameter in self.base.full_targets(shape).values())
        needed = full_bytes(parameters, self.base.dtype, self.full_state)
        purpose = f"full-parameter training of {self.base.name}"
        self.require(purpose, needed.device, self.base.device)
        if needed.host:
            kept = f"what {purpose} keeps in host memory (--full-state compact-host)"
            self.require(kept, needed.host, torch.device("cpu"))
            taken = sum(each.kept_on_host() for each in self.beside)
            if taken + needed.host > self.host_share:
                raise UserError(
                    f"{kept} is {needed.host / 2**30:.4g} GiB for each worker, and of the "
                    f"{self.host_share / 2**30:.4g} GiB that each may take of its host "
                    f"{max(0.0, self.host_share - taken) / 2**30:.4g} are free; "
                    "end other models, train with LoRA (lora_config.rank of 1 or more), or start fewer --workers"
                )

    def kept_on_host(self) -> int:
        """Bytes that models keep in the host's memory, or will when they have taken a step."""
        sizes = [
            model.weights.parameter_count for model in self.optimizers.values() if isinstance(model, CompactOptimizer)
        ]
        return sum(full_bytes(size, self.base.dtype, self.full_state).host for size in sizes)

    def promised(self) -> int:
        """Bytes of the device that models on it will still take when they train, and of graphs, which look free."""
        there = [model for model in self.optimizers.values() if self.pager.is_on_device(model)]
        return self.captured.held + sum(model.unclaimed for model in there)

    def lora_bytes(self, shape: LoraShape) -> ModelBytes:
        """Bytes of a LoRA model of this shape."""
        return lora_bytes(self.base.layout, shape, self.base.dtype)

    def give_back(self) -> bool:
        """Free the memory of graphs, and what torch keeps for tensors of other sizes.

        Returns whether there were graphs.
        """
        gave_way = self.captured.give_way()
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        return gave_way

    def claim_moments(self, optimizer: Optimizer) -> None:
        """Take what a first step takes, for which graphs and other models give way.

        A step that lacks memory has lost its gradients.
        """
        if (
            not (self.captured.passes or self.pager.is_limited)
            or not isinstance(optimizer, ModelOptimizer)
            or optimizer.accumulator.totals is None
        ):
            return
        with suppress(torch.OutOfMemoryError):
            optimizer.claim_moments()
            return
        self.give_back()
        self.pager.leave_only([optimizer])
