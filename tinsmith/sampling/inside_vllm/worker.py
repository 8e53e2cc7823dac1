"""What runs inside vLLM's worker processes: receivers of full weights, a check of adapters, and repairs to how they are applied.

vLLM imports this module (`--worker-extension-cls`) before it loads the model. Only this one, `adapter_check.py` and `receivers.py` import
vLLM's internals; `tests/with_vllm/test_inside_vllm.py` lists them.
"""

from typing import Any

import numpy as np
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tinsmith.sampling.inside_vllm import adapter_check, cpu_lora, receivers


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


def replace_cpu_lora() -> None:
    """Let vLLM's LoRA layers compute with our products on a CPU."""
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = cpu_lora.shrink, cpu_lora.expand, cpu_lora.expand_slice


class WorkerExtension:
    """VLLM adds it to its worker class; importing this module does the rest."""

    def tinsmith_checked_adapter(self, name: str) -> dict[str, bool]:
        """Whether this worker has compared the adapter of this name with what its name says. Called through /collective_rpc."""
        return {"checked": adapter_check.was_checked(name)}


receivers.register()
adapter_check.check_adapters_that_are_loaded()
map_prompt_logprobs_to_adapters()
if current_platform.is_cpu():
    replace_cpu_lora()
