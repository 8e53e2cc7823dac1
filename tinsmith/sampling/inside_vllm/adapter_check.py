"""A check that vLLM holds the adapter that it is asked for. It runs inside vLLM's worker processes.

The name of an adapter ends with the identity of its weights, as the trainer computes it (`identity.py`). Whenever a worker has loaded an
adapter from its files, what now lies in its slot of each layer must have that identity; otherwise the adapter is removed, and loading it is
an error. Replies name the adapter, and so the weights, that they were computed with.

Where a model is divided over several workers (tensor parallel), each slot holds the worker's share of a matrix. Then the whole matrices
that the worker has loaded must have that identity, and its slots must hold its shares of them.
"""

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from tinsmith.sampling.inside_vllm.identity import identity
from tinsmith.sampling.inside_vllm.shares import share_of

log = logging.getLogger(__name__)

_IDENTITY = re.compile(r"-([0-9a-f]{16})$")
_CHECKED: set[str] = set()
"""Names of the adapters that this process has compared."""


def check_adapters_that_are_loaded() -> None:
    """Let vLLM compare each adapter whose name has an identity whenever it has loaded it, also after it was evicted for others."""
    original = LRUCacheWorkerLoRAManager.add_adapter

    def add_adapter(self: Any, lora_request: Any) -> bool:
        is_there = lora_request.lora_int_id in self.list_adapters() and not getattr(lora_request, "load_inplace", False)
        with _together_or_not_at_all(lora_request.lora_name):
            loaded: bool = original(self, lora_request)
            if not is_there and (expected := _IDENTITY.search(lora_request.lora_name)):
                try:
                    _compare(self._adapter_manager, lora_request, expected[1])
                except BaseException:
                    self._adapter_manager.remove_adapter(lora_request.lora_int_id)
                    raise
        return loaded

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter


@contextmanager
def _together_or_not_at_all(name: str) -> Iterator[None]:
    """End this worker if an adapter that was there before cannot be loaded again, and others have the rest of the model.

    That happens in the middle of a step, of which vLLM would go on with the others: they would add up what does not belong together.
    Without this worker the whole server is started again.
    """
    try:
        yield
    except Exception:
        if name in _CHECKED and get_tensor_model_parallel_world_size() > 1:
            log.exception("this worker ends: adapter %s cannot be loaded again", name)
            os.kill(os.getpid(), signal.SIGKILL)
        raise


def was_checked(name: str) -> bool:
    """Whether an adapter of this name was compared here."""
    return name in _CHECKED


def _compare(manager: Any, request: Any, expected: str) -> None:
    """Raise ValueError if the adapter's slot holds other weights than its name says."""
    in_slot = _in_slot(manager, request)
    found = identity(in_slot.items())
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if ranks > 1:
        device = next(iter(in_slot.values())).device  # of the slots: in the host's memory adding up hundreds of matrices takes long
        whole = {name: tensor.to(device) for name, tensor in _as_loaded(manager, request).items()}
        shares = {name: share_of(whole[name], tensor, rank, ranks) for name, tensor in in_slot.items() if name in whole}
        if not shares.keys() == in_slot.keys() == whole.keys() or identity(shares.items()) != found:
            found = f"{found}, which is not that of share {rank + 1} of {ranks} of what was loaded"
        else:
            found = identity(whole.items())
    if found != expected:
        raise ValueError(f"vLLM holds other weights than the trainer's under {request.lora_name}: their identity is {found}")
    _CHECKED.add(request.lora_name)


def _in_slot(manager: Any, request: Any) -> dict[str, Tensor]:
    """The matrices in the adapter's slot, padded with zeros, by the names that `WeightFiles` gives them."""
    slot = manager.lora_index_to_id.index(request.lora_int_id)
    names = _names_in_file(manager.model, Path(request.lora_path))
    tensors: dict[str, Tensor] = {}
    for layer, module in manager.modules.items():
        a, b = _slices(module.lora_a_stacked, slot), _slices(module.lora_b_stacked, slot)
        parts = manager.packed_modules.get(layer, [layer])
        if len(parts) != len(b):  # a fused layer that is a single module in the adapter
            parts, a, b = [layer], a[:1], [torch.cat(b)]
        for part, *pair in zip(parts, a, b, strict=True):
            if part in names:
                tensors |= {f"{names[part]}.{side}": matrix for side, matrix in zip("ab", pair, strict=True)}
    return tensors


def _as_loaded(manager: Any, request: Any) -> dict[str, Tensor]:
    """The whole matrices that the worker keeps of an adapter, of those layers to which it applies adapters, by the same names."""
    names = _names_in_file(manager.model, Path(request.lora_path))
    adapter = manager.get_adapter(request.lora_int_id)
    tensors: dict[str, Tensor] = {}
    for layer in manager.modules:
        loaded = adapter.get_lora(layer)
        if loaded is None:
            continue
        pairs = [(layer, loaded.lora_a, loaded.lora_b)]
        if isinstance(loaded.lora_a, list):
            pairs = list(zip(manager.packed_modules[layer], loaded.lora_a, loaded.lora_b, strict=True))
        for part, a, b in pairs:
            if a is not None:
                tensors |= {f"{names[part]}.a": a, f"{names[part]}.b": b}
    return tensors


def _slices(stacked: Tensor | tuple[Tensor, ...], slot: int) -> list[Tensor]:
    """[rows, columns] of each part of a layer."""
    return [part[slot, 0] for part in ((stacked,) if isinstance(stacked, Tensor) else stacked)]


def _names_in_file(model: Any, directory: Path) -> dict[str, str]:
    """What the adapter's file calls each module, by vLLM's name. Parts of a fused layer keep their names, as in vLLM's own loading."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # vLLM 0.26 calls it get_unstacked_mapper.
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        return {parse_fine_tuned_lora_name(key, mapper)[0]: parse_fine_tuned_lora_name(key)[0] for key in file.offset_keys()}
