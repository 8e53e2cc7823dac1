"""What runs inside vLLM's worker processes: receivers of full weights, a check of adapters, and repairs to how they are applied.

vLLM imports this module (`--worker-extension-cls`) before it loads the model. Only this one, `adapter_check.py` and `receivers.py` import
vLLM's internals; `tests/with_vllm/test_inside_vllm.py` lists them.
"""

from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.lora import lora_model, model_manager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tinsmith.sampling.inside_vllm import DELTA_NET_PARTS, adapter_check, cpu_delta, cpu_lora, receivers


def map_prompt_logprobs_to_adapters() -> None:
    """Let vLLM's model runner apply the right adapter to the logits of a prompt.

    While the logits of a prompt's own tokens are computed, vLLM's table of adapters still describes one row for each running request. With
    another number of rows that is a wrong adapter, or on a CPU an error that ends the engine. So each request gets a table of its own.
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
    """Let an adapter's queries, keys and values of a gated delta net be adapters of their own.

    vLLM fuses `in_proj_qkv` and `in_proj_z` to one layer with a slot for each of q, k, v and z, but reads one adapter for q, k and v
    together, of three times the rank. All slots of all layers would have to be that large.
    """
    original = model_manager.process_packed_modules_mapping

    def packed(*arguments: Any, **keywords: Any) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = original(*arguments, **keywords)
        if modules.get("in_proj_qkvz") == ["in_proj_qkv", "in_proj_z"]:
            modules["in_proj_qkvz"] = [*DELTA_NET_PARTS.values(), "in_proj_z"]
        return modules

    model_manager.process_packed_modules_mapping = packed


def keep_adapters_in_pageable_memory() -> None:
    """Let vLLM copy an adapter to the device from memory as it is.

    It would pin each of several hundred matrices when it reads them, and again when it has joined some. Each is a call of the driver that
    takes longer than the copy, and most adapters are copied once, when they are published.
    """
    lora_model.PIN_MEMORY = model_manager.PIN_MEMORY = False


def take_back_draws_after_pieces_of_prompts() -> None:
    """Let a seed give the same tokens on a CPU however the prompt is cut into pieces.

    After each piece vLLM samples a token that it drops, and sets the random generator back by an offset. A CPU's generators have none, and
    the error ends the engine. Here the generator's state is put back.
    """
    sample, account = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sample_and_put_back(self: Any, *arguments: Any, **keywords: Any) -> Any:
        dropped = self.discard_request_mask.np
        states = [(generator, generator.get_state()) for row, generator in self.input_batch.generators.items() if dropped[row]]
        output = sample(self, *arguments, **keywords)
        for generator, state in states:
            generator.set_state(state)
        return output

    def account_without_generators(self: Any, *arguments: Any, **keywords: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return account(self, *arguments, **keywords)
        finally:
            self.input_batch.generators = generators

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sample_and_put_back, account_without_generators


def replace_cpu_lora() -> None:
    """Let vLLM's LoRA layers compute with our products on a CPU."""
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = cpu_lora.shrink, cpu_lora.expand, cpu_lora.expand_slice


def replace_cpu_delta() -> None:
    """Let vLLM's gated delta nets compute with our torch code on a CPU where vLLM's kernels cannot."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    original = gdn_attention.cpu_gdn_attention_core

    def core(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None or cpu_delta.kernels_take(layer, mixed_qkv):
            original(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            taps = gdn_attention._unpacked_conv_weight(layer)
            cpu_delta.delta_net(layer, taps, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    gdn_attention.cpu_gdn_attention_core = core


class WorkerExtension:
    """VLLM adds it to its worker class; importing this module does the rest."""

    def tinsmith_checked_adapter(self, name: str) -> dict[str, bool]:
        """Whether this worker has compared the adapter of this name with what its name says. Called through /collective_rpc."""
        return {"checked": adapter_check.was_checked(name)}


receivers.register()
adapter_check.check_adapters_that_are_loaded()
map_prompt_logprobs_to_adapters()
take_delta_net_parts_apart()
keep_adapters_in_pageable_memory()
if current_platform.is_cpu():
    replace_cpu_lora()
    replace_cpu_delta()
    take_back_draws_after_pieces_of_prompts()
