"""What we touch of vLLM beside its documented interface: a new version is checked against this first.

Imports, paths, options and fields are read from our code, and names of vLLM's objects are listed here. VLLM's source
must have it all. Nothing of vLLM is imported here.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
ONLY_IN_0_26 = {"get_unstacked_mapper", "trainer_send_weights"}
"""Names that these modules use where they are there: vLLM 0.26 has them, and 0.32 no more."""

USED = """
distributed.device_communicators.shm_broadcast.MessageQueue: dequeue(timeout, indefinite)
distributed.parallel_state: get_tensor_model_parallel_rank(); get_tensor_model_parallel_world_size()
distributed.weight_transfer.base.WeightTransferEngine: device; init_info_cls; model; model_config; update_info_cls;
    finish_weight_update(); init_transfer_engine(init_info); parse_update_info(update_dict);
    receive_weights(update_info); shutdown(); start_weight_update(); update_weights(update_info)
distributed.weight_transfer.factory.WeightTransferEngineFactory: register_engine(name, module_path_or_cls, class_name)
entrypoints.launchers.api_server.entry: main()
forward_context: get_forward_context()
forward_context.ForwardContext: attn_metadata; no_compile_layers
lora.layers.base.BaseLayerWithLoRA: load_weights(weights)
lora.layers.base_linear.BaseLinearLayerWithLoRA: lora_a_stacked; lora_b_stacked
lora.lora_model: PIN_MEMORY
lora.lora_model.LoRAModel: get_lora(module_name)
lora.lora_weights.LoRALayerWeights: lora_a; lora_b
lora.model_manager: PIN_MEMORY; process_packed_modules_mapping
lora.model_manager.LoRAModelManager: lora_index_to_id; modules; packed_modules; get_adapter(adapter_id);
    remove_adapter(adapter_id)
lora.ops.torch_ops.lora_ops: bgmv_expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor, add_inputs);
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor, slice_offset, slice_size, add_inputs);
    bgmv_shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
lora.request.LoRARequest: load_inplace; lora_int_id; lora_name; lora_path
lora.utils: parse_fine_tuned_lora_name(name, weights_mapper)
lora.worker_manager.LRUCacheWorkerLoRAManager: _adapter_manager; add_adapter(lora_request)
lora.worker_manager.WorkerLoRAManager: list_adapters()
model_executor.layers.mamba.abstract.MambaBase: kv_cache
model_executor.layers.mamba.gdn.base.GatedDeltaNetAttention: prefix
model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention: A_log; dt_bias; head_k_dim; head_v_dim;
    key_dim; num_k_heads; num_v_heads; value_dim
model_executor.layers.mamba.ops.cpu.gdn_attention: _unpacked_conv_weight(layer); cpu_gdn_attention_core(mixed_qkv, b, a,
    core_attn_out, layer_name)
model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod: process_weights_after_loading(layer)
model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding: quant_method
model_executor.models.interfaces.SupportsLoRA: packed_modules_mapping
model_executor.models.interfaces.SupportsQuant: hf_to_vllm_mapper
model_executor.models.utils.WeightsMapper: get_rename_mapper()
platforms.interface.Platform: is_cpu()
utils.torch_utils: _resolve_layer_name(layer_name)
v1.attention.backends.gdn_attn.GDNAttentionMetadata: has_initial_state; non_spec_query_start_loc;
    non_spec_state_indices_tensor; num_decodes; num_prefills
v1.executor.multiproc_executor.MultiprocExecutor: response_mqs; _init_executor()
v1.executor.multiproc_executor.WorkerProc: ResponseStatus
v1.executor.multiproc_executor.WorkerProc.ResponseStatus: SUCCESS
v1.worker.gpu_input_batch.CachedRequestState: num_computed_tokens; prompt_token_ids
v1.worker.gpu_input_batch.InputBatch: generators; req_id_to_index; num_reqs(); req_ids()
v1.worker.gpu_model_runner.GPUModelRunner: discard_request_mask; input_batch; lora_config; num_prompt_logprobs;
    requests; _bookkeeping_sync(scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens);
    _get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens); _sample(logits, spec_decode_metadata)
v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin: set_active_loras(input_batch, num_scheduled_tokens,
    num_sampled_tokens, mapping_type)
version: __version__
"""
"""What these modules use of vLLM, by owner: fields, and functions called or replaced, with their parameters."""


@cache
def table() -> dict[str, dict[str, tuple[str, ...] | None]]:
    """`USED` by owner and name: the parameters of functions."""
    found: dict[str, dict[str, tuple[str, ...] | None]] = defaultdict(dict)
    for line in USED.strip().replace("\n    ", " ").splitlines():
        owner, _, names = line.partition(": ")
        for each in names.split("; "):
            name, is_function, parameters = each.rstrip(")").partition("(")
            found[f"vllm.{owner}"][name] = tuple(filter(None, parameters.split(", "))) if is_function else None
    return found


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


def strings(paths: list[Path]) -> set[str]:
    return {node.value for node in nodes(paths) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


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
                    elif (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        found.setdefault(target.attr, node)
            case ast.ImportFrom() | ast.Import():
                found |= {alias.asname or alias.name: node for alias in node.names}
            case ast.If() | ast.Try():  # names that exist for type checkers, or from a file that the build makes
                found = definitions(node) | found
    return found


def located(vllm: Path, dotted: str) -> ast.AST:
    """The node that defines a module, or a name in one."""
    parts = dotted.split(".")[1:]
    for depth in range(len(parts), -1, -1):
        place = vllm.joinpath(*parts[:depth])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            node: ast.AST | None = tree(file)
            for name in parts[depth:]:
                node = definitions(node).get(name) if node is not None else None
            assert node is not None, f"vLLM has no {dotted}"
            return node
    raise AssertionError(f"vLLM has no {dotted}")


def parameters_of(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    return tuple(
        a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")
    )


def test_what_is_imported_is_there_and_its_functions_are_listed(vllm: Path) -> None:
    for node in nodes(list(SAMPLING.rglob("*.py"))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        else:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        for each in dotted:
            if each.split(".")[0] == "vllm" and isinstance(found := located(vllm, each), ast.FunctionDef):
                owner, _, name = each.rpartition(".")
                assert parameters_of(found) == table()[owner][name]


def test_what_is_listed_is_used_and_there(vllm: Path) -> None:
    used = {getattr(node, kind, None) for node in nodes(INSIDE) for kind in ("attr", "id", "name")} | strings(INSIDE)
    for owner, names in table().items():
        there = definitions(located(vllm, owner))
        for name, parameters in names.items():
            assert name in used, f"we do not use {owner}.{name}"
            assert name in there, f"{owner} has no {name}"
            assert parameters_of(there[name]) == parameters, f"{owner}.{name}"
    newer = [vllm / "model_executor" / "models" / "utils.py", vllm / "distributed" / "weight_transfer" / "base.py"]
    assert used >= ONLY_IN_0_26
    assert not ONLY_IN_0_26 & {
        name for node in nodes(newer) if isinstance(node, ast.ClassDef) for name in definitions(node)
    }


def test_what_we_put_in_the_place_of_vllms_takes_what_vllm_gives(vllm: Path) -> None:
    """VLLM may name arguments when it calls our methods, and names some when it calls our products."""
    methods = {name: expected for names in table().values() for name, expected in names.items() if expected is not None}
    for node in nodes(INSIDE):
        if isinstance(node, ast.FunctionDef) and node.name in methods:
            assert parameters_of(node) == methods[node.name], node.name
    products = {"bgmv_shrink": "shrink", "bgmv_expand": "expand", "bgmv_expand_slice": "expand_slice"}
    ours = definitions(tree(SAMPLING / "inside_vllm" / "cpu.py"))
    for node in nodes([vllm / "lora" / "punica_wrapper" / "punica_cpu.py"]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in products:
            taken = parameters_of(ours[products[node.func.id]]) or ()
            assert {keyword.arg for keyword in node.keywords} <= set(taken)
            assert len(node.args) + len(node.keywords) <= len(taken)


def test_paths_options_and_environment_are_there(vllm: Path) -> None:
    """An option may be the field of a configuration that vLLM makes one of."""
    told = strings(list((SAMPLING / "vllm").glob("*.py")))
    paths = {text for text in told if text.startswith("/") and text != "/" and not text.startswith(("/dev/", "/proc/"))}
    environment = {text for text in told if text.startswith("VLLM_")}
    assert strings([*vllm.joinpath("entrypoints").rglob("*.py"), vllm / "envs.py"]) >= paths | environment
    launch = strings([SAMPLING / "vllm" / "launch.py"])
    asked = {text.removeprefix("--") for text in launch if text.startswith("--") and not {" ", "="} & set(text)}
    places = [
        vllm / "engine" / "arg_utils.py",
        *vllm.joinpath("entrypoints").rglob("cli_args.py"),
        *vllm.joinpath("config").glob("*.py"),
    ]
    names = {text.removeprefix("--").replace("-", "_") for text in strings(places) if text.startswith("--")} | {
        "uds",
        "seed",
    }
    names |= {
        node.target.id
        for node in nodes(places)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {text.removeprefix("no-").replace("-", "_") for text in asked} <= names
    assert min(len(paths), len(asked), 3 * len(environment)) > 15


def test_fields_of_a_generate_request_are_there(vllm: Path) -> None:
    request = located(vllm, "vllm.entrypoints.scale_out.token_in_token_out.protocol.GenerateRequest")
    nothing = RenderedInput(np.zeros(0, dtype=np.int32), (), (), torch.zeros(1, 0, dtype=torch.int64))
    body = generate._body(nothing, {}, None, (), "t") | generate._STREAM | {"features": None, "request_id": "x"}
    assert set(definitions(request)) >= set(body)
    params = SamplingParams(1, 1.0, 1.0, -1, 0, StopRule(eos=True, strings=("x",), token_ids=(1,)))
    asked = SampleRequest("s", 0, 1, [], params, PromptQuestions(logprobs=True))
    sampling = protocol.sampling_params(asked, 1, (1,), 100, 0, 1)
    taken = located(vllm, "vllm.sampling_params.SamplingParams")
    assert set(definitions(taken)) >= {*sampling, *protocol.scoring_params(1), *generate._ONE_TOKEN}
