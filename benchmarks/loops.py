"""One SFT step, twice: by Tinsmith's Backend and by a plain transformers + PEFT loop, on the same model files and the same tokens.

Both train LoRA of one rank on every linear layer of the decoder, with alpha 32 and torch's fused AdamW, on the cross-entropy of the
next token. The loop is what a person would write first: a batch padded on the right, `model(input_ids, attention_mask, labels)`,
`backward`, `step`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.models.base import load_base_model
from tinsmith.models.lora import LORA_ALPHA
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The decoder linears that both sides train; the LM head only where asked for."""

ADAM = AdamSettings(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)

Sequences = Sequence[NDArray[np.int32]]
"""Token ids of each sequence; its targets are the same, one to the left."""


def random_sequences(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[NDArray[np.int32]]:
    """Random token ids, one sequence for each length."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def datum(model_id: str, tokens: NDArray[np.int32]) -> DatumWork:
    """Next-token prediction on `tokens`; the last position has weight 0, as its target is unknown."""
    targets = np.append(tokens[1:], 0).astype(np.int64)
    weights = np.append(np.ones(len(tokens) - 1), 0).astype(np.float32)
    rendered = RenderedInput(tokens, (), (), torch.arange(len(tokens)).unsqueeze(0))
    return DatumWork(model_id, rendered, targets, LOSSES["cross_entropy"], {"weights": weights})


def backend_step(directory: Path, device: str, dtype: str, rank: int, unembed: bool, batch: Sequences) -> Callable[[], None]:
    """Loads the model into a Backend; each call is a forward_backward and an optim_step of `batch`."""
    base = load_base_model("bench", str(directory), ModelsConfig(device=device, dtype=dtype), 0)
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("m", LoraShape(rank, seed=0, train_unembed=unembed))
    work = [datum("m", tokens) for tokens in batch]

    def step() -> None:
        outcome = backend.run_pass(work, backward=True)
        if outcome.failures:
            raise RuntimeError(str(outcome.failures))
        backend.optim_step("m", ADAM)

    return step


def peft_step(directory: Path, device: str, dtype: torch.dtype, rank: int, unembed: bool, batch: Sequences) -> Callable[[], None]:
    """Loads the model into transformers + PEFT; each call is one step of the plain loop on `batch`.

    PEFT keeps the adapter in float32. In half precision the loop therefore runs under autocast, as transformers' Trainer does.
    """
    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    network.to(device)
    modules = [*LINEARS, "lm_head"] if unembed else LINEARS
    model: Any = get_peft_model(network, LoraConfig(r=rank, lora_alpha=int(LORA_ALPHA), lora_dropout=0.0, target_modules=modules))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay, fused=True)
    arguments = {name: tensor.to(device) for name, tensor in _padded(batch).items()}
    half = dtype != torch.float32

    def step() -> None:
        with torch.autocast(torch.device(device).type, dtype) if half else nullcontext():
            loss = model(**arguments, use_cache=False).loss
        loss.backward()
        loss.item()  # the Backend reports its loss too
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(batch: Sequences) -> dict[str, torch.Tensor]:
    """[sequences, longest] each. A batch without padding needs no mask, and attention is faster without one."""
    longest = max(len(tokens) for tokens in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, -100)
    for row, tokens in enumerate(batch):
        input_ids[row, : len(tokens)] = labels[row, : len(tokens)] = torch.from_numpy(tokens).long()
    arguments = {"input_ids": input_ids, "labels": labels}
    return arguments if len({len(tokens) for tokens in batch}) == 1 else arguments | {"attention_mask": (labels != -100).long()}
