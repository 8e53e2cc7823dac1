"""The vLLM sampler of a base model, put together from the configuration."""

import atexit
from collections.abc import Callable
from urllib.parse import urlsplit

from tinsmith.config import Config
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.vllm.canary import Canary
from tinsmith.sampling.vllm.client import VLLMClient
from tinsmith.sampling.vllm.launches import launches
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.sampler import VLLMSampler
from tinsmith.sampling.vllm.servers import Launch
from tinsmith.sampling.vllm.weights import WeightFiles


def start_vllm_sampler(base: BaseModel, renderer: Renderer, config: Config, wake: Callable[[], None]) -> VLLMSampler:
    """Start the servers of a base model, or get in touch with those that are named, and return at once.

    `renderer` makes the canary's prompt. `wake` is called in another thread when the sampler's `step` has something to return. Raises
    ConfigError for what cannot work.
    """
    if config.vllm.vllm_urls and len(config.base_models) > 1:
        raise ConfigError("--vllm-url names the servers of one base model; serve one, or let Tinsmith start the vLLM servers")
    for url in config.vllm.vllm_urls:
        _check(url)
    files = WeightFiles(base, config.vllm.vllm_dir)
    atexit.register(files.close)
    canary = Canary(base, renderer)
    sources: list[Launch | str] = [*config.vllm.vllm_urls]
    longest = base.max_context
    if not sources:
        started, longest = launches(base, config, files.root)
        sources += started
    client = VLLMClient(sources, config.sampling.max_running, config.vllm.vllm_hung_s, Publisher(files, canary))
    return VLLMSampler(base, canary, client, longest, config.training.logits_chunk, wake)


def _check(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "unix" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/")):
        raise ConfigError(f"--vllm-url {url}: give scheme, host and port, as in http://127.0.0.1:8001, or unix: and the path of a socket")
