"""Which GPU each vLLM server gets: one numbering over the servers of all base models."""

from collections import Counter

import torch

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError
from tinsmith.sampling.vllm.options import share_of


def gpus_of(base_name: str, config: Config, trainer: torch.device, gpus: int) -> list[int | None]:
    """The GPUs, of those that this process sees, of the servers of one base model. None on a CPU.

    They begin behind the trainer's, which is taken last. Raises ConfigError if servers would have to share a GPU that has no room for both.
    """
    names = list(base_model_sources(config))
    servers = config.vllm.vllm_servers
    places = [_gpu_of(trainer, gpus, index) for index in range(len(names) * servers)]
    share = share_of(config.vllm.vllm_args)
    for gpu, count in Counter(places).items():
        if gpu is not None and count * share > 1:
            raise ConfigError(
                f"{servers} vLLM servers each for {len(names)} base models on {gpus} GPUs: {count} would share GPU {gpu}, and each takes "
                f"{share:g} of its memory; lower --vllm-servers, or pass --vllm-arg=--gpu-memory-utilization={0.9 / count:.2f}"
            )
    first = names.index(base_name) * servers
    return places[first : first + servers]


def _gpu_of(trainer: torch.device, gpus: int, index: int) -> int | None:
    return None if trainer.type == "cpu" else ((trainer.index or 0) + 1 + index) % gpus
