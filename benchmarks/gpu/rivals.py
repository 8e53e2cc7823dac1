"""What users run today: training steps of transformers with PEFT's LoRA and Liger's kernels, all in bfloat16.

On several GPUs that is FSDP2 (`torch.distributed.fsdp.fully_shard`) around the same model, with masters in float32
where all weights train.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.measuring import DEVICE
from benchmarks.gpu.shapes import network_of

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DELTA_LINEARS = ["in_proj_qkv", "in_proj_z", "out_proj"]

Inputs = dict[str, Tensor]
"""Keyword arguments of a model's forward, labels included."""


def texts(batch: Sequence[Any]) -> list[Inputs]:
    """One micro-batch [sequences, length] if all sequences are equally long, else a micro-batch of one for each."""
    rows = [torch.from_numpy(tokens).long() for tokens in batch]
    together = [torch.stack(rows)] if len({len(row) for row in rows}) == 1 else [row.unsqueeze(0) for row in rows]
    return [{"input_ids": ids.to(DEVICE), "labels": ids.to(DEVICE)} for ids in together]


def lora_network(
    config: Any, rank: int, checkpointing: bool = False, liger: bool = False, unembed: bool = False
) -> Any:
    """A random model with PEFT's LoRA of that rank on every linear layer of the decoder, adapters in bfloat16 too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from peft import LoraConfig, get_peft_model

    network = network_of(config)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=network)
    hybrid = config.get_text_config().model_type == "qwen3_5_text"
    modules = [*LINEARS, *DELTA_LINEARS] if hybrid else LINEARS
    modules = [*modules, "lm_head"] if unembed else modules
    lora = LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules=modules)
    model: Any = get_peft_model(network, lora, autocast_adapter_dtype=False)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def sharded_network(config: Any, rank: int, workers: int, checkpointing: bool) -> Any:
    """A random model that FSDP2 shards over all processes, layer by layer: LoRA of that rank, or all weights for 0."""
    if rank:
        model = lora_network(config, rank, checkpointing)
        layers = model.get_base_model().model.layers
    else:
        model = network_of(config, torch.float32).train()
        layers = model.model.layers
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh(DEVICE, (workers,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def step_of(
    model: Any, micro_batches: Sequence[Inputs] | Callable[[], Sequence[Inputs]], autocast: bool = False
) -> Callable[[], float]:
    """A training step: forward and backward of each micro-batch, then AdamW. It returns the loss, as our Backend does.

    A function gives the micro-batches of each step anew; tensors on the CPU are copied to the device in the step.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)

    def step() -> float:
        losses = []
        for inputs in micro_batches() if callable(micro_batches) else micro_batches:
            placed = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in inputs.items()}
            with torch.autocast(DEVICE, torch.bfloat16) if autocast else nullcontext():
                loss = model(**placed, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    return step
