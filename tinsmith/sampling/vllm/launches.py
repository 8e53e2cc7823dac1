"""How our own vLLM servers are started: the options and the environment that the rest of this room relies on."""

import json
import os
import sys
from pathlib import Path

import torch

import tinsmith
from tinsmith.config import Config
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.sampling.inside_vllm import TransferKind, backend_of
from tinsmith.sampling.vllm.longest import MAX_LORAS, cpu_cache_gib, longest_sequence, lora_rank
from tinsmith.sampling.vllm.placing import gpus_of
from tinsmith.sampling.vllm.servers import Launch
from tinsmith.wire.prompt_scores import MAX_TOPK

_LONGEST_SOCKET = 80
"""Bytes of a directory in which the path of a Unix socket still finds room."""


def launches(base: BaseModel, config: Config, directory: Path) -> tuple[list[Launch], int]:
    """The servers to start for a base model, and the tokens of the longest sequence that they take.

    Their sockets go to `directory`, which only the user can enter. Raises ConfigError if vLLM cannot serve the configuration.
    """
    if len(os.fsencode(directory)) > _LONGEST_SOCKET:
        raise ConfigError(f"the directory {directory} is too long for sockets in it; choose a shorter vllm_dir")
    gpus = gpus_of(base.name, config, base.device, torch.cuda.device_count())
    longest = longest_sequence(base, config, gpus[0])
    logs = Path(config.data_dir).resolve() / "vllm"
    package = Path(tinsmith.__file__).parent
    directory.joinpath("tinsmith").symlink_to(package)
    directory.joinpath("sitecustomize.py").symlink_to(package / "sampling" / "inside_vllm" / "every_process.py")
    found = []
    for index, gpu in enumerate(gpus):
        name = f"{_file_name(base.name)}-{index}"
        kind = transfer_kind(config.vllm.vllm_transfer, base.device, gpu)
        command, environment = _command(base, config, kind, longest), _environment(config, directory, gpu)
        found.append(Launch(command, environment, directory, name, logs / f"{name}.log", kind))
    return found, longest


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


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "-." else "_" for character in text)[-20:]


def _command(base: BaseModel, config: Config, kind: TransferKind, longest: int) -> list[str]:
    options = [
        *("--model", base.tokenizer_id, "--dtype", str(base.dtype).removeprefix("torch.")),
        # One more than there are slots: new weights are compared while samples fill all of them.
        *("--max-model-len", str(longest), "--max-num-seqs", str(config.sampling.max_running + 1)),
        "--enable-scale-out",  # the generate and render endpoints
        *(
            "--enable-lora",
            "--max-lora-rank",
            str(lora_rank(config.models.max_lora_rank)),
            "--max-loras",
            str(MAX_LORAS),
            "--max-cpu-loras",
            "16",
        ),
        *("--worker-extension-cls", "tinsmith.sampling.inside_vllm.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": backend_of(kind)})),
        # Log-probabilities at the temperature of the request; one more than the likeliest, because the sampled token counts as one.
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_TOPK + 1)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]
    if base.family.takes_images:
        options.append("--no-mm-device-do-normalize")  # pixel values come normalized, as the trainer's are
    if base.device.type == "cpu":
        # A seeded request whose prompt is cut into pieces ends vLLM's engine on a CPU; without pieces a step must hold a whole prompt.
        options += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, longest))]
    return [config.vllm.vllm_python or sys.executable, "-m", "tinsmith.sampling.inside_vllm.launcher", *options, *config.vllm.vllm_args]


def _environment(config: Config, directory: Path, gpu: int | None) -> dict[str, str]:
    environment = os.environ | {
        "PYTHONPATH": str(directory),  # our package, and no other of this environment; and `every_process.py`
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer; the socket keeps them to this user
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # what its processes have to say to each other stays on this machine
        # The newer runner applies adapters wrongly where it scores a prompt's tokens, and `worker.py` repairs the other one only.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if gpu is None:
        # Compiling takes 20 seconds at the first request, for functions that take microseconds.
        return environment | {"VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib(config)), "TORCHDYNAMO_DISABLE": "1"}
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = _visible_name(gpu)
    return environment


def _visible_name(gpu: int) -> str:
    """A GPU of this process, as CUDA_VISIBLE_DEVICES names it in another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)
