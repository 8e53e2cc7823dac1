"""Every setting of a server, once: its name, type, default, unit and limits.

`tinsmith serve` makes one command-line option of each setting (`kv_cache_gib` becomes `--kv-cache-gib`), and a YAML file given with
`--config` holds the same tree by section. `load` merges the two (the command line wins) and refuses unknown keys and impossible values.
A section is passed to the room that needs it; nothing reads configuration from a global.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.config_values import fill, knob, read_yaml
from tinsmith.errors import ConfigError
from tinsmith.logs import LEVELS


@dataclass
class ServerConfig:
    """The HTTP side."""

    host: str = knob("127.0.0.1", "Address to listen on")
    port: int = knob(8000, "TCP port to listen on; 0 takes a free one and prints it", low=0, high=65535)
    long_poll_s: float = knob(30.0, "How long retrieve_future holds a request before it answers 408", "seconds", 0.1, 40)
    max_header_kib: int = knob(64, "Largest request line and headers together", "KiB", 4, 1024)
    max_body_mib: int = knob(256, "Largest request body, after decompression", "MiB", 1, 4096)
    fwdbwd_max_chunk_len: int = knob(1024, "Largest number of datums the SDK puts into one forward_backward request", "datums", 1)
    sample_result_ttl_s: float = knob(600.0, "How long a finished sample waits to be fetched", "seconds", 1)
    max_pending_samples: int = knob(
        65536, "Maximum number of unfinished sequences (num_samples of all requests); further requests get HTTP 429", "sequences", 1
    )
    max_pending_samples_per_session: int = knob(16384, "Maximum number of unfinished sequences of one session", "sequences", 1)
    max_pending_sample_mib: int = knob(
        2048, "Maximum size of the bodies of all unfinished sample requests; further requests get HTTP 429", "MiB", 1
    )
    max_pending_sample_mib_per_session: int = knob(512, "Maximum size of the bodies of one session's unfinished sample requests", "MiB", 1)
    max_queued_session_mib: int = knob(
        2048, "Maximum size of one session's queued training operations, images included; further ones get HTTP 429", "MiB", 1
    )
    max_queued_mib: int = knob(
        16384, "Maximum size of all queued training operations, which are kept on disk; further ones get HTTP 429", "MiB", 1
    )
    session_idle_s: float = knob(600.0, "A session without heartbeat and request for so long ends; its models are saved", "seconds", 0.1)
    result_ttl_s: float = knob(
        86400.0, "How long the result of a training operation waits to be fetched while its session lives", "seconds", 1
    )
    ended_session_ttl_s: float = knob(
        2592000.0,
        "How long an ended session, its operations and its models without checkpoints stay in the database",
        "seconds",
        60,
    )
    download_ttl_s: int = knob(3600, "How long the URL of a file to download is valid", "seconds", 60, 604800)
    engine_silent_s: float = knob(
        10.0, "An engine process without a heartbeat for so long counts as not ready (it sends two a second)", "seconds", 2
    )
    engine_hung_s: float = knob(120.0, "An engine process without a heartbeat for so long is killed and restarted", "seconds", 2)
    shutdown_s: float = knob(
        120.0, "How long Ctrl-C waits for the engine to finish its pass, and again for each model that it saves", "seconds", 0.1
    )


@dataclass
class RequestsConfig:
    """How much one request may hold. It is counted before anything is built from it."""

    max_json_kib: int = knob(128, "Largest JSON body of any request but a sample", "KiB", 64, 65536)
    max_sample_mib: int = knob(64, "Largest JSON body of a sample, with its images in base64", "MiB", 1, 1024)
    max_sample_values: int = knob(2**20, "Most numbers (token IDs, target IDs) and other values in the JSON of a sample", "values", 1024)
    max_datums: int = knob(4096, "Most datums of one forward_backward request", "datums", 1)
    max_chunks: int = knob(32768, "Most chunks (texts and images) of one forward_backward request", "chunks", 1)
    max_prompt_chunks: int = knob(8192, "Most chunks of one sample's prompt", "chunks", 1)
    max_images: int = knob(4096, "Most images of one request; the SDK puts up to 5 MB of datums into one", "images", 1)


@dataclass
class ModelsConfig:
    """How base models are loaded."""

    device: str = knob(
        "auto",
        "Where the models run: auto, cpu, cuda or cuda:N (auto takes CUDA when there is one)",
        choices=("auto", "cpu", "cuda", "cuda:N with a number N"),
        pattern=r"auto|cpu|cuda(:\d+)?",
    )
    dtype: str = knob(
        "auto", "Precision of the frozen base (auto: bfloat16 on CUDA, float32 on a CPU)", choices=("auto", "float32", "bfloat16")
    )
    max_context: int = knob(0, "Longest sequence, prompt and answer together; 0 takes the model's own limit", "tokens", 0)
    max_lora_rank: int = knob(256, "Largest LoRA rank a client may ask for", "", 1)


@dataclass
class ImagesConfig:
    """Limits and caches for images, which are untrusted input."""

    max_image_mib: float = knob(20.0, "Largest encoded image", "MiB", 0.001)
    max_image_pixels: int = knob(50_000_000, "Largest image, checked in its header before it is decoded", "pixels", 1)
    max_request_pixels: int = knob(
        200_000_000, "Most pixels of all images of one sample or datum together, read from their headers before any is decoded", "pixels", 1
    )
    max_aspect: float = knob(200.0, "Largest ratio of an image's longer side to its shorter", "", 1)
    image_cache_mib: int = knob(512, "Memory for processed images (pixel values and vision features), by content hash", "MiB", 0)


@dataclass
class TrainingConfig:
    """The training side of the engine."""

    tokens_per_pass: int = knob(8192, "Most tokens packed into one forward or backward pass", "tokens", 1)
    logits_chunk: int = knob(1024, "Rows of logits that exist at one time while log-probabilities are computed", "tokens", 1)
    ended_model_ttl_s: float = knob(
        604800.0, "How long the checkpoint of a model is kept whose session was idle or whose server was stopped", "seconds", 0.1
    )
    max_unrecorded_mib: float = knob(
        256.0, "Results held in memory while the database takes none (locked, disk full); beyond it training waits", "MiB", 0
    )
    held_operation_s: float = knob(600.0, "How long an operation waits for the missing seq_id before it fails", "seconds", 0.1)


@dataclass
class SamplingConfig:
    """The sampling side of the engine."""

    sampler: str = knob(
        "local",
        "local: sample on the training weights in this engine; vllm: let vLLM servers sample; none: refuse sampling",
        choices=("local", "vllm", "none"),
    )
    kv_cache_gib: float = knob(2.0, "Memory for the key/value cache of one base model", "GiB", 0.001)
    snapshot_gib: float = knob(
        4.0, "Memory for snapshots and checkpoints that are sampled; beyond it the least recently used go to disk", "GiB", 0
    )
    snapshot_disk_gib: float = knob(
        32.0,
        "Disk for snapshots; beyond it the least recently sampled are dropped, but for each model's newest and those being sampled",
        "GiB",
        0,
    )
    snapshot_idle_h: float = knob(
        24.0, "A snapshot that nobody samples for so long is dropped, unless it is its model's newest", "hours", 0.0001
    )
    max_running: int = knob(256, "Sequences decoded together", "sequences", 1)
    prefill_tokens: int = knob(4096, "Most prompt tokens computed in one step", "tokens", 1)


@dataclass
class VLLMConfig:
    """vLLM servers, with sampler=vllm."""

    vllm_servers: int = knob(1, "vLLM servers to start for each base model, unless --vllm-url names others", "servers", 1, 64)
    vllm_urls: list[str] = knob([], "Use the vLLM server at this URL, and start none; repeat for several")
    vllm_python: str = knob("", "Python of the environment that vLLM is installed in, if it is not this one")
    vllm_args: list[str] = knob([], "One more option for vLLM servers that are started, as --vllm-arg=--max-loras=8; repeat for several")
    vllm_transfer: str = knob(
        "auto",
        "How full weights get into vLLM servers that are started: file, in memory; ipc, the memory of one GPU that both use; broadcast, "
        "from GPU to GPU (auto: what fits)",
        choices=("auto", "file", "ipc", "broadcast"),
    )
    vllm_hung_s: float = knob(
        120.0,
        "Restart a vLLM server that has samples to do after so much silence; must exceed the time of a transfer",
        "seconds",
        1,
    )
    vllm_dir: str = knob("", "Directory for the weights that vLLM servers use, readable for all of them; empty keeps them in memory")


@dataclass
class Config:
    """A whole server."""

    base_models: list[str] = knob([], "Base model to serve, as [NAME=]PATH_OR_HUB_ID; repeat for several")
    data_dir: str = knob("tinsmith-data", "Directory of the command log and everything else that outlives the process")
    checkpoint_root: str = knob("", "Where new checkpoints go, if not into data_dir: a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    log_level: str = knob(
        "info", "Which lines are logged: debug adds one for each sample; warning and error leave out what works", choices=LEVELS
    )
    server: ServerConfig = field(default_factory=ServerConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)


@dataclass(frozen=True)
class Knob:
    """One leaf of the tree. `path` is ("sampling", "kv_cache_gib"); a leaf name occurs once in the whole tree."""

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    unit: str

    @property
    def name(self) -> str:
        """The name of the option without dashes, e.g. "kv_cache_gib"."""
        return self.path[-1]


def knobs(section: Any = None, path: tuple[str, ...] = ()) -> Iterator[Knob]:
    """All leaves of the configuration tree with their defaults, in declaration order."""
    section = Config() if section is None else section
    hints = typing.get_type_hints(type(section))
    for spec in dataclasses.fields(section):
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            yield from knobs(value, (*path, spec.name))
        else:
            yield Knob((*path, spec.name), hints[spec.name], value, spec.metadata["help"], spec.metadata["unit"])


def load(file: Path | None = None, options: Mapping[str, Any] = types.MappingProxyType({})) -> Config:
    """Defaults, then the YAML file, then command-line options by leaf name; checked.

    Raises ConfigError: unreadable file, unknown key, wrong type or value out of its limits.
    """
    config = Config()
    if file is not None:
        fill(config, read_yaml(file), str(file))
    places = {leaf.name: leaf.path for leaf in knobs()}
    for name, value in options.items():
        if name not in places:
            raise ConfigError(f"unknown option {name!r}; the options are {', '.join(places)}")
        section: Any = config
        for part in places[name][:-1]:
            section = getattr(section, part)
        fill(section, {name: value}, "command line")
    return config


def base_model_sources(config: Config) -> dict[str, str]:
    """Name and source of every base model: the absolute path of a local directory, or a Hub id. Without a NAME= the source is the name.

    Raises ConfigError: no base model at all, two of one name, a name that requests could not carry, a directory that is not there.
    """
    if not config.base_models:
        raise ConfigError("no base model to serve; give at least one --base-model [NAME=]PATH_OR_HUB_ID")
    sources: dict[str, str] = {}
    for spec in config.base_models:
        name, source = _base_model(spec)
        if name in sources:
            raise ConfigError(f"base_models: two are named {name!r}; tell them apart with NAME=PATH_OR_HUB_ID")
        sources[name] = source
    return sources


def _base_model(spec: str) -> tuple[str, str]:
    name, separator, source = ("", "", spec) if Path(spec).is_dir() else spec.rpartition("=")
    if separator and not re.fullmatch(r"[^\s:]+", name):
        raise ConfigError(f"base_models: {spec!r} must have a name without blanks and colons before its '='")
    directory = Path(source).expanduser()
    if directory.is_dir():
        source = str(directory.resolve())
        if not (directory / "config.json").is_file():
            raise ConfigError(f"base_models: {spec!r}: {source} holds no model (there is no config.json in it)")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ConfigError(f"base_models: {spec!r}: there is no directory {source!r}, and a Hub id looks like ORGANISATION/MODEL")
    return name or source, source


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as plain dictionaries, which `from_tree` reads back in the engine process."""
    return dataclasses.asdict(config)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """The inverse of `to_tree`. Raises ConfigError as `load` does."""
    config = Config()
    fill(config, tree, "configuration")
    return config
