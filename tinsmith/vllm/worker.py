"""What runs inside of vLLM's worker processes: weights that arrive as a file, and repairs to how adapters are applied.

vLLM imports this module (`--worker-extension-cls`) before it loads the model. It is the only one of ours that imports vLLM's inside.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tinsmith.vllm import FILE_BACKEND, cpu_lora


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """A file needs no preparation."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One file of weights, under the names of the model's checkpoint."""

    path: str


class FileWeightTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Weights come in a safetensors file, which lies in memory. vLLM's own engines all need CUDA on both sides."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make ready to load layer by layer."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file. vLLM's own version synchronizes an accelerator, which a CPU has none of."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load one file, tensor by tensor."""
        with safe_open(update_info.path, framework="pt", device=str(self.device)) as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.offset_keys())

    def finish_weight_update(self) -> None:
        """Put the layers into the form in which they compute."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


def _repack_heads(model: torch.nn.Module) -> None:
    """Pack the output projection again: on a CPU vLLM computes with a packed copy, which it forgets to renew where embeddings are tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


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
    """Say that all rows of logits which come next belong to this request, as many as it has prompt tokens to score."""
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
    """What vLLM adds to its worker class. Importing this module is what matters."""


WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileWeightTransfer)
map_prompt_logprobs_to_adapters()
if current_platform.is_cpu():
    replace_cpu_lora()
