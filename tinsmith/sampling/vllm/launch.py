"""Decides how our own vLLM servers start: versions, GPUs, longest sequence, options and environment.

vLLM does not start if its cache has no room for one sequence of the greatest length. So that is what fits into its
memory beside the weights, if it is less than the model's context.
"""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import tinsmith
from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError
from tinsmith.memory.budget import CPU_CACHE
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.layers import Attention, DeltaNet, LayerKind
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.inside_vllm import TransferKind, backend_of
from tinsmith.sampling.vllm.options import share_of, value_of
from tinsmith.sampling.vllm.servers import Launch
from tinsmith.training.parallel.process_group import LOOPBACK, communication_variables
from tinsmith.wire.prompt_scores import MAX_TOPK

log = logging.getLogger(__name__)

MAX_LORAS = 4
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""

_FOR_PASSES = 0.15
"""Part of a server's memory for activations and CUDA graphs. An estimate."""
_STATES = 3
"""States of gated delta nets that must fit: what a pass reads, what it writes, and one in the prefix cache."""
_SHORTEST = 1024
"""Tokens. A server with room for fewer is not worth starting."""
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_GIB = 2**30
_LONGEST_SOCKET = 80
"""Most bytes of a directory's name that leave the path of a Unix socket within the system's limit."""


def launches(base: BaseModel, config: Config, directory: Path) -> tuple[list[Launch], int]:
    """Return the servers to start for a base model, and the tokens of the longest sequence there.

    Their sockets go to `directory`, which only the user can enter. Raises ConfigError if vLLM cannot serve the
    configuration.
    """
    if len(os.fsencode(directory)) > _LONGEST_SOCKET:
        raise ConfigError(f"the directory {directory} is too long for sockets in it; choose a shorter vllm_dir")
    served_on = pick_device(config.models.device)
    check_installed(base, config.vllm.vllm_python or sys.executable, served_on)
    check_divisible(base, config.vllm.vllm_tensor_parallel)
    places = gpus_of(base.name, config, served_on, torch.cuda.device_count())
    longest = longest_sequence(base, config, places[0])
    logs = Path(config.data_dir).resolve() / "vllm"
    package = Path(tinsmith.__file__).parent
    directory.joinpath("tinsmith").symlink_to(package)
    directory.joinpath("sitecustomize.py").symlink_to(package / "sampling" / "inside_vllm" / "every_process.py")
    found, safe_name = [], re.sub(r"[^\w.-]", "_", base.name)[-20:]
    for index, gpus in enumerate(places):
        name = f"{safe_name}-{index}"
        kind = transfer_kind(config.vllm.vllm_transfer, base.device, gpus, config.vllm.vllm_tensor_parallel)
        command, environment = (
            _command(base, config, kind, longest, on_gpu=bool(gpus)),
            _environment(config, directory, gpus),
        )
        found.append(
            Launch(command, environment, directory, name, logs / f"{name}.log", kind, config.vllm.vllm_tensor_parallel)
        )
    return found, longest


def check_divisible(base: BaseModel, ranks: int) -> None:
    """Raise ConfigError if a base model cannot be divided over so many GPUs, or was not tested so."""
    if ranks == 1:
        return
    if has_delta_nets(base):
        raise ConfigError(
            f"{base.name} ({base.family.model_type}) has gated delta nets, with which --vllm-tensor-parallel {ranks} "
            "was not tested: use 1"
        )
    heads = base.text_config.num_attention_heads
    if heads % ranks:
        raise ConfigError(f"--vllm-tensor-parallel {ranks} does not divide the {heads} attention heads of {base.name}")


def transfer_kind(wanted: str, trainer: torch.device, gpus: Sequence[int], ranks: int = 1) -> TransferKind:
    """Choose how full weights get to a server on these GPUs, none for a CPU.

    Raises ConfigError if `wanted` cannot work there.
    """
    if gpus and trainer.type == "cpu":
        if wanted not in ("auto", "file"):
            raise ConfigError(
                f"vllm_transfer={wanted} begins at a GPU; weights come from the host's memory with train=none or "
                "shard=weights; use file"
            )
        return "file"
    if ranks > 1 and wanted == "ipc":
        raise ConfigError(
            f"vllm_transfer=ipc reaches one GPU of a server, and --vllm-tensor-parallel {ranks} gives it more. "
            "Use broadcast"
        )
    shared = bool(gpus) and gpus[0] == (trainer.index or 0)
    match wanted:
        case "auto":
            return "file" if not gpus else "ipc" if shared else "broadcast"
        case "ipc" if not shared:
            place = f"GPU {gpus[0]}" if gpus else "no GPU"
            raise ConfigError(
                f"vllm_transfer=ipc needs a GPU that trainer and server share; the server has {place}. Use auto"
            )
        case "broadcast" if shared:
            raise ConfigError(
                "vllm_transfer=broadcast needs a GPU of its own for each server; "
                "here one shares the trainer's. Use auto"
            )
        case "file" | "ipc" | "broadcast":
            return wanted
        case _:
            raise ConfigError(f"vllm_transfer={wanted!r} must be auto, file, ipc or broadcast")


def _command(base: BaseModel, config: Config, kind: TransferKind, longest: int, on_gpu: bool) -> list[str]:
    options = [
        *("--model", base.tokenizer_id, "--dtype", str(base.dtype).removeprefix("torch.")),
        # One more than there are slots: new weights are compared while samples fill all of them.
        *("--max-model-len", str(longest), "--max-num-seqs", str(config.sampling.max_running + 1)),
        "--enable-scale-out",  # the generate and render endpoints
        *("--enable-lora", "--max-lora-rank", str(lora_rank(config.models.max_lora_rank))),
        *("--max-loras", str(MAX_LORAS), "--max-cpu-loras", "16"),
        *("--worker-extension-cls", "tinsmith.sampling.inside_vllm.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": backend_of(kind)})),
        # Log-probabilities at the temperature of the request; one more than the likeliest, because the sampled token
        # counts as one.
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_TOPK + 1)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *("--structured-outputs-config", json.dumps({"backend": "guidance"})),  # as the local sampler's grammars
    ]
    if on_gpu and config.vllm.vllm_turn_s:
        options.append("--enable-sleep-mode")
    if config.vllm.vllm_tensor_parallel > 1:
        options += ["--tensor-parallel-size", str(config.vllm.vllm_tensor_parallel)]
        options += ["--distributed-executor-backend", "tinsmith.sampling.inside_vllm.executor.HearAllExecutor"]
    if base.family.takes_images:
        options.append("--no-mm-device-do-normalize")  # pixel values come normalized, as the trainer's are
    if not on_gpu:
        options.append("--enforce-eager")
    elif has_delta_nets(base):
        options.append("--gdn-prefill-backend=triton")  # FlashInfer's kernels were not compared with the trainer
    launcher = [config.vllm.vllm_python or sys.executable, "-m", "tinsmith.sampling.inside_vllm.launcher"]
    return [*launcher, *options, *config.vllm.vllm_args]


def _environment(config: Config, directory: Path, gpus: Sequence[int]) -> dict[str, str]:
    # What its processes have to say to each other, and to the trainer, stays on this machine. NCCL reads that once,
    # when it is first used.
    environment = communication_variables(LOOPBACK) | os.environ
    environment |= {
        # Our package, and no other of this environment; and `inside_vllm/every_process.py`
        "PYTHONPATH": str(directory),
        "PYTHONSAFEPATH": "1",  # nothing that lies in the working directory is imported, also by what vLLM starts
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer; the socket keeps them to this user
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        # The newer runner applies adapters wrongly where it scores a prompt's tokens; `inside_vllm/worker.py` repairs
        # the other one only.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if not gpus:
        # Compiling takes 20 seconds at the first request, for functions that take microseconds.
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib(config)), "TORCHDYNAMO_DISABLE": "1"}
        return _cores_of_ranks(config.vllm.vllm_tensor_parallel) | environment
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible_name, gpus))
    return environment


def _cores_of_ranks(ranks: int) -> dict[str, str]:
    """Let vLLM bind each of several processes to cores of its own: it finds none by itself on a single NUMA node."""
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise ConfigError(
            f"--vllm-tensor-parallel {ranks}: each process needs a core of its own, and there are {len(cores)}"
        )
    each = len(cores) // ranks
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def _visible_name(gpu: int) -> str:
    """Return a GPU of this process as CUDA_VISIBLE_DEVICES names it in another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)


# On which GPU


def gpus_of(base_name: str, config: Config, device: torch.device, gpus: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each server of one base model, numbered as this process sees them; none on a CPU.

    Servers of all base models are counted together, from the GPU after the trainers' on; the trainer's own comes last.
    Those that take turns with the trainer are on its GPU. Several workers share none with a server, nor does a server
    of several GPUs. Raises ConfigError if there are too few GPUs, or too little room on one.
    """
    names = list(base_model_sources(config))
    servers, ranks = config.vllm.vllm_servers, config.vllm.vllm_tensor_parallel
    if device.type == "cpu":
        return [()] * servers
    count, trainers = len(names) * servers, max(1, config.distributed.workers) if config.training.trains else 0
    if (ranks > 1 or trainers > 1) and trainers + count * ranks > gpus:
        beside = {0: "", 1: ", and one GPU for the trainer"}.get(trainers, f", and {trainers} GPUs for the workers")
        raise ConfigError(
            f"{servers} vLLM servers each for {len(names)} base models, of {ranks} GPUs each "
            f"(--vllm-tensor-parallel){beside} are {trainers + count * ranks} GPUs; there are {gpus}"
        )
    order = (
        [device.index or 0] * count
        if config.vllm.vllm_turn_s
        else [((device.index or 0) + trainers + index) % gpus for index in range(count * ranks)]
    )
    places = [tuple(order[start : start + ranks]) for start in range(0, len(order), ranks)]
    share = share_of(config.vllm.vllm_args)
    for gpu, sharing in Counter(order).items():
        if sharing * share > 1:
            raise ConfigError(
                f"{servers} vLLM servers each for {len(names)} base models on {gpus} GPUs: {sharing} would share GPU "
                f"{gpu}, and each takes {share:g} of its memory; lower --vllm-servers, or pass "
                f"--vllm-arg=--gpu-memory-utilization={0.9 / sharing:.2f}"
            )
    first = names.index(base_name) * servers
    return places[first : first + servers]


# For how long sequences


@dataclass(frozen=True)
class ServedSizes:
    """The memory that a base model takes at a server, in bytes."""

    weights: int
    cache_per_token: int
    state: int
    """The states of one sequence."""
    per_lora_rank: int
    """One rank of one adapter on all modules that LoRA can train."""


def sizes_of(layers: Sequence[LayerKind], parameters: int, per_lora_rank: int, dtype: torch.dtype) -> ServedSizes:
    """Compute the sizes of a model to which one rank of an adapter adds `per_lora_rank` parameters."""
    cache = sum(layer.bytes_per_token(dtype) for layer in layers if isinstance(layer, Attention))
    state = sum(layer.state_bytes(dtype) for layer in layers if isinstance(layer, DeltaNet))
    return ServedSizes(parameters * dtype.itemsize, cache, state, per_lora_rank * dtype.itemsize)


def divided(sizes: ServedSizes, ranks: int, heads: int) -> ServedSizes:
    """Return the sizes on each of several GPUs, of which every one has a head of keys and values, of `heads` in all.

    Adapters count whole: one of the two matrices of each is.
    """
    return replace(
        sizes, weights=-(-sizes.weights // ranks), cache_per_token=-(-sizes.cache_per_token // min(ranks, heads))
    )


def longest_sequence(base: BaseModel, config: Config, gpus: Sequence[int]) -> int:
    """Compute the most tokens of prompt and answer at servers of a base model on these GPUs, none for a CPU.

    The log says if they are fewer than the model's context. Raises ConfigError if there is too little room, or if
    --vllm-arg asks for more than the context.
    """
    options = config.vllm.vllm_args
    asked = value_of(options, "--max-model-len")
    if asked is not None:
        return _asked_for(asked, base.max_context)
    parameters, per_rank = (
        sum(p.numel() for p in base.network.parameters()),
        base.layout.lora_parameters(LoraShape(rank=1, seed=0)),
    )
    ranks, text = config.vllm.vllm_tensor_parallel, base.text_config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    sizes = divided(sizes_of(base.layout.layers, parameters, per_rank, base.dtype), ranks, heads)
    if not gpus:
        memory = cpu_cache_gib(config) * _GIB
        fits, room = (
            (memory - _STATES * sizes.state) // sizes.cache_per_token,
            f"a cache of {memory / _GIB:g} GiB (--kv-cache-gib)",
        )
    else:
        memory = int(share_of(options) * torch.cuda.get_device_properties(gpus[0]).total_memory)
        fits = tokens_that_fit(sizes, memory, config)
        room = (
            f"{memory / _GIB:.1f} GiB of a GPU (--vllm-arg=--gpu-memory-utilization) with {sizes.weights / _GIB:.1f} "
            "GiB of weights and adapters (--max-lora-rank, --vllm-arg=--max-loras)"
        )
    if fits < min(_SHORTEST, base.max_context):
        raise ConfigError(
            f"a vLLM server of {base.name} has {room}: no sequence of {_SHORTEST} tokens fits in; give it more"
        )
    if fits >= base.max_context:
        return base.max_context
    longest = fits // _SHORTEST * _SHORTEST
    log.info(
        "vLLM servers of %s take sequences of up to %d of %d tokens: more do not fit into %s",
        base.name,
        longest,
        base.max_context,
        room,
    )
    return longest


def tokens_that_fit(sizes: ServedSizes, memory: int, config: Config) -> int:
    """Compute the tokens that fit into so many bytes of a GPU, beside weights, adapters and activations."""
    adapters = int(value_of(config.vllm.vllm_args, "--max-loras") or MAX_LORAS) * lora_rank(config.models.max_lora_rank)
    left = memory * (1 - _FOR_PASSES) - sizes.weights - _STATES * sizes.state - adapters * sizes.per_lora_rank
    return int(left // sizes.cache_per_token)


def lora_rank(largest: int) -> int:
    """Return the rank of vLLM's slots for adapters of rank up to `largest`. Raises ConfigError if vLLM has none."""
    for rank in RANKS:
        if largest <= rank:
            return rank
    raise ConfigError(f"max_lora_rank={largest} is more than vLLM can serve; it ends at {RANKS[-1]}")


def cpu_cache_gib(config: Config) -> int:
    """Return the memory of a server's cache without a GPU: vLLM takes whole GiB."""
    return max(1, round(config.sampling.kv_cache_gib or CPU_CACHE / _GIB))


def _asked_for(text: str, context: int) -> int:
    match = re.fullmatch(r"(\d+)([kKmM]?)", text)
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < tokens <= context:
        raise ConfigError(
            f"--vllm-arg=--max-model-len={text}: give a number of tokens from 1 to the model's context of {context}"
        )
    return tokens


# Which vLLM samples models with gated delta nets: only what was run, and agreed with the trainer (the table in
# docs/vllm.md). For other models the canary and the probes decide.

RUN_WITH_DELTA_NETS = frozenset({("0.32", "cpu"), ("0.26", "cuda")})
"""Version of vLLM, to the second number, and type of device."""
_ASK = (
    "from importlib.metadata import distributions\n"
    "print(next((d.version for d in distributions() if d.metadata['Name'] in ('vllm', 'vllm-cpu')), 'missing'))"
)


def check_installed(base: BaseModel, python: str, served_on: torch.device) -> None:
    """Raise ConfigError if this Python's vLLM is not known to sample a base model on a device of that type."""
    if not has_delta_nets(base):
        return
    asked = subprocess.run(
        [python, "-c", _ASK], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONSAFEPATH": "1"}
    )
    if asked.returncode:
        raise ConfigError(f"{python} does not say which vLLM it has: {asked.stderr.strip() or asked.stdout.strip()}")
    reason = refusal(base, asked.stdout.strip(), served_on)
    if reason is not None:
        raise ConfigError(reason)


def refusal(base: BaseModel, version: str, served_on: torch.device) -> str | None:
    """Return why this version of vLLM does not sample a base model on such a device; None if it does."""
    numbers, device = ".".join(version.split(".")[:2]), served_on.type
    if not has_delta_nets(base) or (numbers, device) in RUN_WITH_DELTA_NETS:
        return None
    known = ", ".join(f"{known} on {where}" for known, where in sorted(RUN_WITH_DELTA_NETS))
    return (
        f"{base.name} ({base.family.model_type}) has gated delta nets, with which vLLM {version} was not tested on "
        f"{device}, only {known}: serve it with --sampler local"
    )


def has_delta_nets(base: BaseModel) -> bool:
    """Return whether a base model has gated delta nets."""
    return any(isinstance(layer, DeltaNet) for layer in base.layout.layers)
