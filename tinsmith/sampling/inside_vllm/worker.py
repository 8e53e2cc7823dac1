"""Code in vLLM's workers: receivers of full weights, a check of adapters, and repairs to how they are applied.

vLLM imports this module (`--worker-extension-cls`) before it loads the model. `tests/with_vllm/test_inside_vllm.py`
lists what it and `receivers.py` touch of vLLM.

An adapter's name ends with the identity of its weights, as the trainer computes it (`identity.py`). What lies in its
slot of each layer must have that identity; otherwise loading it is an error. With tensor parallelism the whole matrices
that the worker has loaded must have it, and its slots must hold its shares of them.
"""

import logging
import os
import re
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.lora import lora_model, model_manager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tinsmith.sampling.inside_vllm import DELTA_NET_PARTS, cpu, receivers
from tinsmith.sampling.inside_vllm.identity import identity, share_of

log = logging.getLogger(__name__)

_IDENTITY = re.compile(r"-([0-9a-f]{16})$")
_CHECKED: set[str] = set()
"""Names of the adapters that this process has compared."""


# The check of adapters


def check_adapters_that_are_loaded() -> None:
    """Let vLLM compare each adapter whose name has an identity whenever it has loaded it, also after it was evicted."""
    original = LRUCacheWorkerLoRAManager.add_adapter

    def add_adapter(self: Any, lora_request: Any) -> bool:
        is_there = lora_request.lora_int_id in self.list_adapters() and not getattr(lora_request, "load_inplace", False)
        with ExitStack() as failing:
            if lora_request.lora_name in _CHECKED and get_tensor_model_parallel_world_size() > 1:
                failing.push(partial(_end_worker, lora_request.lora_name))
            loaded: bool = original(self, lora_request)
            if not is_there and (expected := _IDENTITY.search(lora_request.lora_name)):
                failing.callback(self._adapter_manager.remove_adapter, lora_request.lora_int_id)
                _compare(self._adapter_manager, lora_request, expected[1])
            failing.pop_all()
        return loaded

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter


def _end_worker(name: str, _type: object, error: BaseException | None, _traceback: object) -> None:
    """End this worker, because an adapter that was there before cannot be loaded again.

    That happens in the middle of a step. Other workers, which have the rest of the model, would go on with it and add
    up what does not belong together. Without this worker the whole server is started again.
    """
    log.error("this worker ends: adapter %s cannot be loaded again", name, exc_info=error)
    os.kill(os.getpid(), signal.SIGKILL)


def _compare(manager: Any, request: Any, expected: str) -> None:
    """Raise ValueError if the adapter's slot holds other weights than its name says."""
    in_slot = _in_slot(manager, request)
    found = identity(in_slot.items())
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if ranks > 1:
        # Of the slots: in the host's memory adding up hundreds of matrices takes long
        device = next(iter(in_slot.values())).device
        whole = {name: tensor.to(device) for name, tensor in _as_loaded(manager, request).items()}
        shares = {name: share_of(whole[name], tensor, rank, ranks) for name, tensor in in_slot.items() if name in whole}
        if not shares.keys() == in_slot.keys() == whole.keys() or identity(shares.items()) != found:
            found = f"{found}, which is not that of share {rank + 1} of {ranks} of what was loaded"
        else:
            found = identity(whole.items())
    if found != expected:
        raise ValueError(
            f"vLLM holds other weights than the trainer's under {request.lora_name}: their identity is {found}"
        )
    _CHECKED.add(request.lora_name)


def _in_slot(manager: Any, request: Any) -> dict[str, Tensor]:
    """Return the matrices in the adapter's slot, padded with zeros, by the names that `WeightFiles` gives them."""
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
    """Return the whole matrices of an adapter that the worker keeps for layers with adapters, by the same names."""
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
    """Return [rows, columns] of each part of a layer."""
    return [part[slot, 0] for part in ((stacked,) if isinstance(stacked, Tensor) else stacked)]


def _names_in_file(model: Any, directory: Path) -> dict[str, str]:
    """Map vLLM's name of each module to that in the adapter's file. Parts of a fused layer keep their names."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # vLLM 0.26 calls it get_unstacked_mapper.
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        return {
            parse_fine_tuned_lora_name(key, mapper)[0]: parse_fine_tuned_lora_name(key)[0] for key in file.offset_keys()
        }


# Repairs


def map_prompt_logprobs_to_adapters() -> None:
    """Let vLLM apply the right adapter to the logits of a prompt.

    While these are computed, vLLM's table of adapters still describes one row for each running request. With another
    number of rows that is a wrong adapter, or on a CPU an error that ends the engine. So each request gets a table of
    its own.
    """
    original = GPUModelRunner._get_prompt_logprobs_dict

    def by_request(self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        waiting = self.num_prompt_logprobs
        for request_id in [key for key in waiting if key in num_scheduled_tokens]:
            self.num_prompt_logprobs = {request_id: waiting[request_id]}
            if self.lora_config:
                _map_rows_to(self, request_id, num_scheduled_tokens)
            answers |= original(self, hidden_states, num_scheduled_tokens)
            if not self.num_prompt_logprobs:
                del waiting[request_id]
        self.num_prompt_logprobs = waiting
        return answers

    GPUModelRunner._get_prompt_logprobs_dict = by_request


def _map_rows_to(runner: Any, request_id: str, scheduled: dict[str, int]) -> None:
    """Map the next rows of logits to this request, as many as it has prompt tokens to score."""
    request = runner.requests[request_id]
    left = len(request.prompt_token_ids) - 1 - request.num_computed_tokens
    batch = runner.input_batch
    rows = np.zeros(batch.num_reqs, dtype=np.int32)
    rows[batch.req_id_to_index[request_id]] = max(0, min(scheduled[request_id], left))
    tokens = np.array([scheduled[key] for key in batch.req_ids], dtype=np.int32)
    runner.set_active_loras(batch, tokens, rows)


def take_delta_net_parts_apart() -> None:
    """Let queries, keys and values of a gated delta net have adapters of their own.

    vLLM fuses `in_proj_qkv` and `in_proj_z` to one layer with a slot for each of q, k, v and z, but reads one adapter
    for q, k and v together, of three times the rank. All slots of all layers would have to be that large.
    """
    original = model_manager.process_packed_modules_mapping

    def packed(*arguments: Any, **keywords: Any) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = original(*arguments, **keywords)
        if modules.get("in_proj_qkvz") == ["in_proj_qkv", "in_proj_z"]:
            modules["in_proj_qkvz"] = [*DELTA_NET_PARTS.values(), "in_proj_z"]
        return modules

    model_manager.process_packed_modules_mapping = packed


def keep_adapters_in_pageable_memory() -> None:
    """Let vLLM copy an adapter to the device from pageable memory.

    It would pin each of several hundred matrices, some of them twice. That takes longer than the copy, and most
    adapters are copied once, when they are published.
    """
    lora_model.PIN_MEMORY = model_manager.PIN_MEMORY = False


def take_back_draws_after_pieces_of_prompts() -> None:
    """Let a seed give the same tokens on a CPU however the prompt is cut into pieces.

    After each piece vLLM samples a token that it drops, and sets the random generator back by an offset, which a CPU's
    generator does not have: the engine would end. Here the generator's state is put back.
    """
    sample, account = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sample_and_put_back(self: Any, *arguments: Any, **keywords: Any) -> Any:
        dropped = self.discard_request_mask.np
        states = [
            (generator, generator.get_state()) for row, generator in self.input_batch.generators.items() if dropped[row]
        ]
        output = sample(self, *arguments, **keywords)
        for generator, state in states:
            generator.set_state(state)
        return output

    def account_without_generators(self: Any, *arguments: Any, **keywords: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        accounted = account(self, *arguments, **keywords)  # an error ends the engine
        self.input_batch.generators = generators
        return accounted

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sample_and_put_back, account_without_generators


def replace_cpu_lora() -> None:
    """Let vLLM's LoRA layers compute with our products on a CPU."""
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = cpu.shrink, cpu.expand, cpu.expand_slice


def replace_cpu_delta() -> None:
    """Let gated delta nets compute with our torch code on a CPU where vLLM's kernels cannot."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    original = gdn_attention.cpu_gdn_attention_core

    def core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None or cpu.kernels_take(layer, mixed_qkv):
            original(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            taps = gdn_attention._unpacked_conv_weight(layer)
            cpu.delta_net(layer, taps, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    gdn_attention.cpu_gdn_attention_core = core


class WorkerExtension:
    """A part of vLLM's worker class; importing this module does the rest."""

    def tinsmith_checked_adapter(self, name: str) -> dict[str, bool]:
        """Return whether this worker has compared the adapter of this name. Called through /collective_rpc."""
        return {"checked": name in _CHECKED}


receivers.register()
check_adapters_that_are_loaded()
map_prompt_logprobs_to_adapters()
take_delta_net_parts_apart()
keep_adapters_in_pageable_memory()
if current_platform.is_cpu():
    replace_cpu_lora()
    replace_cpu_delta()
    take_back_draws_after_pieces_of_prompts()
