"""What we touch of vLLM beside its documented interface: a new version is checked against this first.

The lists say exactly what the code uses of vLLM's objects; imports, paths, options and fields are read from the code. VLLM's source must
have it all. Nothing of vLLM is imported here.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinsmith
from tests.with_vllm.serving import PYTHON
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm import generate, protocol
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

SAMPLING = Path(tinsmith.__file__).parent / "sampling"
INSIDE = [SAMPLING / "inside_vllm" / f"{name}.py" for name in ("cpu", "executor", "launcher", "receivers", "worker")]
"""The modules that import vLLM or get its objects."""

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "vllm.distributed.parallel_state.get_tensor_model_parallel_rank": (),
    "vllm.distributed.parallel_state.get_tensor_model_parallel_world_size": (),
    "vllm.entrypoints.launchers.api_server.entry.main": (),
    "vllm.forward_context.get_forward_context": (),
    "vllm.lora.utils.parse_fine_tuned_lora_name": ("name", "weights_mapper"),
    "vllm.utils.torch_utils._resolve_layer_name": ("layer_name",),
}
"""The parameters of the functions that we import."""

FIELDS = {
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": {"device", "init_info_cls", "model", "model_config", "update_info_cls"},
    "vllm.forward_context.ForwardContext": {"attn_metadata", "no_compile_layers"},
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": {"lora_a_stacked", "lora_b_stacked"},
    "vllm.lora.lora_model": {"PIN_MEMORY"},
    "vllm.lora.lora_weights.LoRALayerWeights": {"lora_a", "lora_b"},
    "vllm.lora.model_manager.LoRAModelManager": {"lora_index_to_id", "modules", "packed_modules"},
    "vllm.lora.model_manager": {"PIN_MEMORY", "process_packed_modules_mapping"},
    "vllm.lora.request.LoRARequest": {"load_inplace", "lora_int_id", "lora_name", "lora_path"},
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": {"_adapter_manager"},
    "vllm.model_executor.layers.mamba.abstract.MambaBase": {"kv_cache"},
    "vllm.model_executor.layers.mamba.gdn.base.GatedDeltaNetAttention": {"prefix"},
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention": {
        "A_log",
        "dt_bias",
        "head_k_dim",
        "head_v_dim",
        "key_dim",
        "num_k_heads",
        "num_v_heads",
        "value_dim",
    },
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding": {"quant_method"},
    "vllm.model_executor.models.interfaces.SupportsLoRA": {"packed_modules_mapping"},
    "vllm.model_executor.models.interfaces.SupportsQuant": {"hf_to_vllm_mapper"},
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": {"response_mqs"},
    "vllm.v1.executor.multiproc_executor.WorkerProc": {"ResponseStatus"},
    "vllm.v1.executor.multiproc_executor.WorkerProc.ResponseStatus": {"SUCCESS"},
    "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata": {
        "has_initial_state",
        "non_spec_query_start_loc",
        "non_spec_state_indices_tensor",
        "num_decodes",
        "num_prefills",
    },
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": {"num_computed_tokens", "prompt_token_ids"},
    "vllm.v1.worker.gpu_input_batch.InputBatch": {"generators", "req_id_to_index"},
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": {
        "discard_request_mask",
        "input_batch",
        "lora_config",
        "num_prompt_logprobs",
        "requests",
    },
    "vllm.version": {"__version__"},
}
"""What we use of vLLM's classes and modules, by where it is defined."""

METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": {
        "finish_weight_update": (),
        "init_transfer_engine": ("init_info",),
        "parse_update_info": ("update_dict",),
        "receive_weights": ("update_info",),
        "shutdown": (),
        "start_weight_update": (),
        "update_weights": ("update_info",),
    },
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory": {
        "register_engine": ("name", "module_path_or_cls", "class_name")
    },
    "vllm.lora.layers.base.BaseLayerWithLoRA": {"load_weights": ("weights",)},
    "vllm.lora.lora_model.LoRAModel": {"get_lora": ("module_name",)},
    "vllm.lora.model_manager.LoRAModelManager": {"get_adapter": ("adapter_id",), "remove_adapter": ("adapter_id",)},
    "vllm.lora.ops.torch_ops.lora_ops": {
        "bgmv_expand": ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "add_inputs"),
        "bgmv_expand_slice": (
            "inputs",
            "lora_b_weights",
            "output_tensor",
            "lora_indices_tensor",
            "slice_offset",
            "slice_size",
            "add_inputs",
        ),
        "bgmv_shrink": ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling"),
    },
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": {"add_adapter": ("lora_request",)},
    "vllm.lora.worker_manager.WorkerLoRAManager": {"list_adapters": ()},
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention": {
        "_unpacked_conv_weight": ("layer",),
        "cpu_gdn_attention_core": ("mixed_qkv", "b", "a", "core_attn_out", "layer_name"),
    },
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": {"process_weights_after_loading": ("layer",)},
    "vllm.model_executor.models.utils.WeightsMapper": {"get_rename_mapper": ()},
    "vllm.platforms.interface.Platform": {"is_cpu": ()},
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": {"_init_executor": ()},
    "vllm.distributed.device_communicators.shm_broadcast.MessageQueue": {"dequeue": ("timeout", "indefinite")},
    "vllm.v1.worker.gpu_input_batch.InputBatch": {"num_reqs": (), "req_ids": ()},
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": {
        "_bookkeeping_sync": ("scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
        "_get_prompt_logprobs_dict": ("hidden_states", "num_scheduled_tokens"),
        "_sample": ("logits", "spec_decode_metadata"),
    },
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin": {
        "set_active_loras": ("input_batch", "num_scheduled_tokens", "num_sampled_tokens", "mapping_type")
    },
}
"""Their functions that we call or replace, and the parameters of these (without `self`)."""

ONLY_IN_0_26 = {"get_unstacked_mapper", "trainer_send_weights"}
"""Names that vLLM 0.26 has, and 0.32 no more."""

NOT_VLLMS = {
    *("__iter__", "_counted", "_receive", "_tensor", "accelerator", "add", "append", "argv", "array", "b64decode", "bfloat16", "bool"),
    *("cat", "check_adapters_that_are_loaded", "compile", "conv1d", "delta_net", "dtype", "errors", "exception", "exp", "expand"),
    *("expand_slice", "fileno", "flatten", "float", "get", "get_state", "get_tensor", "getLogger", "getpgid", "getpid", "group"),
    *("handles", "identity", "index", "int32", "is_last", "items", "kernels_take", "keys", "kill", "killpg", "load", "loads", "long"),
    *("masked_fill", "meeting_point", "Module", "mT", "named_modules", "nn", "np", "offset_keys", "outline", "path", "queue", "read"),
    *("receive", "received", "register", "repeat_interleave", "rpartition", "rsqrt", "run_module", "search", "set_state", "setpgrp"),
    *("shape", "shrink", "SIGKILL", "sigmoid", "SIGTERM", "silu", "Size", "sleep", "softplus", "split", "square", "squeeze", "stack"),
    *("start", "stdin", "sum", "synchronize", "Tensor", "Thread", "to", "tolist", "transpose", "type", "unflatten", "values", "view"),
    *("T", "nonzero", "reshape", "unique", "zero_", "zeros"),
}
"""Names of attributes in these modules that are Python's, PyTorch's, NumPy's or ours."""


@pytest.fixture(scope="module")
def vllm() -> Path:
    """VLLM's source."""
    return next((PYTHON.parent.parent / "lib").glob("python3*/site-packages/vllm"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(paths: list[Path]) -> Iterator[ast.AST]:
    for path in paths:
        yield from ast.walk(tree(path))


def definitions(parent: ast.AST) -> dict[str, ast.AST]:
    """What a module or a class defines, by name; of a class also what its methods set on `self`."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(parent) if isinstance(parent, ast.ClassDef) else getattr(parent, "body", []):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.setdefault(name, node)
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
                    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                        found.setdefault(target.attr, node)
            case ast.ImportFrom() | ast.Import():
                found |= {alias.asname or alias.name: node for alias in node.names}
            case ast.If() | ast.Try():  # names that exist for type checkers, or from a file that the build makes
                found = definitions(node) | found
    return found


def located(vllm: Path, dotted: str) -> ast.AST | None:
    """The node that defines a module, or a name in one; None if vLLM does not have it."""
    parts = dotted.split(".")[1:]
    for depth in range(len(parts), -1, -1):
        place = vllm.joinpath(*parts[:depth])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            node: ast.AST | None = tree(file)
            for name in parts[depth:]:
                node = definitions(node).get(name) if node is not None else None
            return node
    return None


def parameters_of(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls"))


def test_what_is_imported_is_there(vllm: Path) -> None:
    used = set()
    for node in nodes(list(SAMPLING.rglob("*.py"))):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert used >= set(FUNCTIONS)
    for dotted in used:
        found = located(vllm, dotted)
        assert found is not None, f"vLLM has no {dotted}"
        if isinstance(found, ast.FunctionDef):
            assert parameters_of(found) == FUNCTIONS[dotted]


def test_attributes_are_listed_and_there(vllm: Path) -> None:
    """Each name in our modules is in one of the lists, and each name in the lists is in our modules."""
    used = {node.attr for node in nodes(INSIDE) if isinstance(node, ast.Attribute)}
    used |= {name for node in nodes(INSIDE) for name in looked_up(node)}
    own = {node.name for node in nodes(INSIDE) if isinstance(node, ast.FunctionDef)}
    set_by_us = {
        target.id for node in nodes(INSIDE) if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    listed = {name for names in [*FIELDS.values(), *METHODS.values()] for name in names}
    assert used - NOT_VLLMS - ONLY_IN_0_26 <= listed
    assert listed <= used | own | set_by_us
    assert used | own >= NOT_VLLMS | ONLY_IN_0_26
    for owner in FIELDS.keys() | METHODS.keys():
        found = located(vllm, owner)
        assert found is not None, f"vLLM has no {owner}"
        there, methods = definitions(found), METHODS.get(owner, {})
        for name in {*FIELDS.get(owner, ()), *methods}:
            assert name in there, f"{owner} has no {name}"
            assert parameters_of(there[name]) == methods.get(name), f"{owner}.{name}"
    newer = [vllm / "model_executor" / "models" / "utils.py", vllm / "distributed" / "weight_transfer" / "base.py"]
    assert not ONLY_IN_0_26 & {name for node in nodes(newer) if isinstance(node, ast.ClassDef) for name in definitions(node)}


def looked_up(node: ast.AST) -> list[str]:
    """The name that a call of getattr or hasattr names."""
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [name]
    return []


def test_what_we_put_in_the_place_of_vllms_takes_what_vllm_gives(vllm: Path) -> None:
    """VLLM may name arguments when it calls our methods, and names some when it calls our products."""
    methods = {name: expected for of_owner in METHODS.values() for name, expected in of_owner.items()}
    for node in nodes(INSIDE):
        if isinstance(node, ast.FunctionDef) and node.name in methods:
            assert parameters_of(node) == methods[node.name], node.name
    products = {"bgmv_shrink": "shrink", "bgmv_expand": "expand", "bgmv_expand_slice": "expand_slice"}
    ours = definitions(tree(SAMPLING / "inside_vllm" / "cpu.py"))
    for node in nodes([vllm / "lora" / "punica_wrapper" / "punica_cpu.py"]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in products:
            taken = parameters_of(ours[products[node.func.id]])
            assert taken is not None
            assert {keyword.arg for keyword in node.keywords} <= set(taken)
            assert len(node.args) + len(node.keywords) <= len(taken)


def strings(paths: list[Path]) -> set[str]:
    return {node.value for node in nodes(paths) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_paths_and_environment_are_there(vllm: Path) -> None:
    told = strings(list((SAMPLING / "vllm").glob("*.py")))
    paths = {text for text in told if text.startswith("/") and text != "/" and not text.startswith(("/dev/", "/proc/"))}
    environment = {text for text in told if text.startswith("VLLM_")}
    assert len(paths) > 15
    assert len(environment) > 5
    assert strings([*vllm.joinpath("entrypoints").rglob("*.py"), vllm / "envs.py"]) >= paths | environment


def test_options_of_the_command_line_are_there(vllm: Path) -> None:
    """As an option, or as the field of a configuration that vLLM makes one of."""
    asked = {text.removeprefix("--") for text in strings([SAMPLING / "vllm" / "launch.py"]) if text.startswith("--") and " " not in text}
    asked = {text.removeprefix("no-").replace("-", "_") for text in asked if "=" not in text}
    assert len(asked) > 15
    names = {"uds", "seed"}
    for path in [
        vllm / "engine" / "arg_utils.py",
        *vllm.joinpath("entrypoints").rglob("cli_args.py"),
        *vllm.joinpath("config").glob("*.py"),
    ]:
        names |= {text.removeprefix("--").replace("-", "_") for text in strings([path]) if text.startswith("--")}
        names |= {node.target.id for node in nodes([path]) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert asked <= names


def test_fields_of_a_generate_request_are_there(vllm: Path) -> None:
    request = located(vllm, "vllm.entrypoints.scale_out.token_in_token_out.protocol.GenerateRequest")
    assert request is not None
    nothing = RenderedInput(np.zeros(0, dtype=np.int32), (), (), torch.zeros(1, 0, dtype=torch.int64))
    body = generate._body(nothing, {}, None, ()) | generate._STREAM | {"features": None, "request_id": "x"}
    assert set(definitions(request)) >= set(body)
    taken = located(vllm, "vllm.sampling_params.SamplingParams")
    assert taken is not None
    assert set(definitions(taken)) >= {*sampling_fields(), *protocol.scoring_params(1), *generate._ONE_TOKEN}


def sampling_fields() -> dict[str, Any]:
    stop = StopRule(eos=True, strings=("x",), token_ids=(1,))
    asked = SampleRequest("s", 0, 1, [], SamplingParams(1, 1.0, 1.0, -1, 0, stop), PromptQuestions(logprobs=True))
    return protocol.sampling_params(asked, 1, (1,), 100, 0, 1)
