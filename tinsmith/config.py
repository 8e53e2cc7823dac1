"""Every setting of a server, declared once: name, type, default, unit and limits.

`kv_cache_gib` becomes the option `--kv-cache-gib`, the variable `TINSMITH_KV_CACHE_GIB`, and a key of its section in
the file of `--config`. The command line overrides the environment, which overrides the file. Each part of the server is
given its section; no configuration is global.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.config_values import (
    Setting,
    base_model_source,
    fill,
    fill_from_environment,
    put,
    read_yaml,
    setting,
    settings_of,
)
from tinsmith.errors import ConfigError
from tinsmith.logs import FORMATS, LEVELS

CONFIG_VARIABLE = "TINSMITH_CONFIG"
"""Names the configuration file, as `--config` does."""


@dataclass
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = setting("127.0.0.1", "Network address to listen on; 0.0.0.0 listens on all", common=True)
    port: int = setting(
        8000, "TCP port to listen on; 0 chooses a free port, which is printed", low=0, high=65535, common=True
    )
    http_servers: int = setting(
        1,
        "Processes that answer HTTP at this address, for more requests than one core can take; with 1 the server "
        "answers itself",
        "processes",
        1,
        64,
        common=True,
    )
    allowed_hosts: list[str] = setting(
        [],
        "Name of this server beside its addresses, localhost and this machine's name; repeat for several. "
        "Requests with another Host, or from web pages of other sites, are refused",
        common=True,
    )
    trusted_proxies: list[str] = setting(
        [],
        "Address or network of a proxy that tells in X-Forwarded-For and X-Forwarded-Proto who its clients are; "
        "repeat for several. One on this machine is believed anyway",
    )
    tls_cert: str = setting(
        "", "File of the certificates in PEM with which to serve HTTPS; empty serves HTTP", common=True
    )
    tls_key: str = setting(
        "", "File of the key of --tls-cert in PEM; empty if the certificate's file has it", common=True
    )
    metrics_address: str = setting(
        "",
        "HOST:PORT that answers /metrics to everybody; empty answers it on the server's port, to this machine only",
        common=True,
    )
    otlp_endpoint: str = setting(
        "",
        "URL of a collector of OpenTelemetry, such as http://127.0.0.1:4318, that gets spans of all operations and "
        "samples; it needs pip install 'tinsmith[otel]'",
    )
    long_poll_s: float = setting(
        30.0,
        "Longest time that retrieve_future waits for a result, or half as long; after HTTP 408 the client asks again",
        "seconds",
        0.1,
        40,
    )
    connection_idle_s: float = setting(
        75.0,
        "Close a connection after this long without a whole request header, or with a body slower than 4 KiB/s; "
        "must exceed the time for which clients keep idle connections",
        "seconds",
        0.1,
    )
    max_header_kib: int = setting(64, "Maximum size of a request's line and headers together", "KiB", 4, 1024)
    max_body_mib: int = setting(256, "Maximum size of a request body after decompression", "MiB", 1, 4096)
    fwdbwd_max_chunk_len: int = setting(
        1024, "Maximum number of datums that the SDK puts into one forward_backward request", "datums", 1
    )
    sample_result_ttl_s: float = setting(600.0, "How long the result of a sample waits to be fetched", "seconds", 1)
    max_finished_sample_mib: int = setting(
        1024,
        "Maximum size of unfetched sample results; then the oldest are dropped, and the SDK repeats them",
        "MiB",
        1,
    )
    kept_sample_mib: int = setting(
        64, "Size of the newest finished samples that stay in memory for the console; 0 keeps none", "MiB", 0
    )
    run_files: str = setting(
        "",
        "Directory that runs of `tinsmith rl` write (output: directory), or one above; the console shows its episodes "
        "to admins",
    )
    max_pending_samples: int = setting(
        65536,
        "Maximum number of unfinished sequences (num_samples of each request); further requests get HTTP 429",
        "sequences",
        1,
    )
    max_pending_samples_per_session: int = setting(
        16384, "Maximum number of unfinished sequences of one session", "sequences", 1
    )
    max_pending_sample_mib: int = setting(
        2048, "Maximum size of all unfinished sample requests; further ones get HTTP 429", "MiB", 1
    )
    max_pending_sample_mib_per_session: int = setting(
        512, "Maximum size of one session's unfinished sample requests", "MiB", 1
    )
    max_queued_session_mib: int = setting(
        2048,
        "Maximum size of one session's queued training operations with images; further ones get HTTP 429",
        "MiB",
        1,
    )
    max_queued_mib: int = setting(
        16384, "Maximum size, on disk, of all queued training operations; further ones get HTTP 429", "MiB", 1
    )
    session_idle_s: float = setting(
        600.0, "End a session after this long without heartbeat and request, and save its models", "seconds", 0.1
    )
    result_ttl_s: float = setting(
        86400.0,
        "How long the result of a training operation waits to be fetched, while its session lives",
        "seconds",
        1,
    )
    ended_session_ttl_s: float = setting(
        2592000.0,
        "How long an ended session stays in the database, with operations and with models that have no checkpoint",
        "seconds",
        60,
    )
    kept_operations_mib: int = setting(
        0, "Disk space for requests of finished training operations; the oldest go first, and 0 keeps none", "MiB", 0
    )
    kept_first_passes: int = setting(
        2,
        "Beside these, the first forward and backward passes of each run, whose requests stay with it for the console, "
        "up to 1 MiB each without images; 0 keeps none",
        "passes",
        0,
        16,
    )
    download_ttl_s: int = setting(3600, "How long a download URL is valid", "seconds", 60, 604800)
    engine_silent_s: float = setting(
        10.0,
        "Report not ready after this long without a heartbeat of the engine, which sends two a second",
        "seconds",
        2,
    )
    engine_hung_s: float = setting(
        120.0, "Restart the engine, or one of several HTTP servers, after this long without a heartbeat", "seconds", 2
    )
    stand_by: bool = setting(
        True,
        "Let processes with libraries imported stand by: the next engine, with about 80 MiB of memory, and one that "
        "forks the next workers when some, the engine or the server end, with about 400 MiB, but not in Ray",
    )
    worker_hung_s: float = setting(120.0, "Restart a worker after this long without a heartbeat", "seconds", 2)
    worker_still_s: float = setting(
        50.0,
        "Restart a worker that was ready after this long without a heartbeat, or busy without progress (using no "
        "processor, and waiting for no disk or other worker)",
        "seconds",
        2,
    )
    worker_stuck_s: float = setting(
        1800.0,
        (
            "Restart a worker that was ready after this long in one call, even with progress; "
            "must exceed the longest wait for a GPU"
        ),
        "seconds",
        2,
    )
    shutdown_s: float = setting(
        120.0, "After Ctrl-C, maximum time for the pass under way, and for saving each model", "seconds", 0.1
    )


@dataclass
class RequestsConfig:
    """Limits of one request, checked before anything is built from it."""

    max_json_kib: int = setting(
        128, "Maximum size of the JSON body of a request that is not a sample", "KiB", 64, 65536
    )
    max_sample_mib: int = setting(
        64, "Maximum size of the JSON body of a sample request, with its images in base64", "MiB", 1, 1024
    )
    max_upload_mib: int = setting(
        4096, "Maximum size of the weights of an adapter that is uploaded (external_weights_upload_start)", "MiB", 1
    )
    max_sample_values: int = setting(
        2**20, "Maximum number of JSON values in a sample request; each token id is one", "values", 1024
    )
    max_datums: int = setting(4096, "Maximum number of datums in one forward_backward request", "datums", 1)
    max_chunks: int = setting(
        32768, "Maximum number of chunks (texts and images) in one forward_backward request", "chunks", 1
    )
    max_prompt_chunks: int = setting(
        8192, "Maximum number of chunks (texts and images) in the prompt of a sample", "chunks", 1
    )
    max_images: int = setting(
        4096, "Maximum number of images in one request; the SDK puts up to 5 MB of datums into one", "images", 1
    )


@dataclass
class ModelsConfig:
    """Settings for loading base models."""

    device: str = setting(
        "auto",
        "Device of the models: cpu, cuda, cuda:N, or auto, which is cuda if there is a GPU, else cpu",
        choices=("auto", "cpu", "cuda", "cuda:N with a number N"),
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        common=True,
    )
    dtype: str = setting(
        "auto",
        "Precision of base models: float32, bfloat16, or auto, which is bfloat16 on a GPU and float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
        common=True,
    )
    expert_dtype: str = setting(
        "model",
        "How experts of mixtures are held: model, in the base's precision; fp8, in 8 bits; nf4 or mxfp4, in 4. "
        "The log says what it costs. Adapters train on such experts, all weights (rank 0) do not",
        choices=("model", "fp8", "nf4", "mxfp4"),
    )
    memory_share: float = setting(
        1.0,
        "Share of a GPU's memory that this server takes; the rest is left to other programs on it, "
        "such as a vLLM server, which takes what --vllm-arg=--gpu-memory-utilization says. "
        "Servers of Tinsmith share a GPU only if each takes less than 1",
        "",
        0.01,
        1,
        common=True,
    )
    max_context: int = setting(
        0, "Maximum length of prompt and answer together; 0 is the model's own limit", "tokens", 0, common=True
    )
    max_lora_rank: int = setting(256, "Maximum LoRA rank that a client may ask for", "", 1, common=True)
    deterministic: bool = setting(
        False,
        (
            "Let samples and log-probabilities depend on their request alone, to the last bit; "
            "slower, and not for gated delta nets"
        ),
    )
    self_check: str = setting(
        "quick",
        "How base models are checked before they are served: full; or quick, which takes seconds if the full check has "
        "passed before with the same files, versions, device and settings",
        choices=("quick", "full"),
    )
    compile_cache: str = setting(
        "", "Directory of what is compiled for a GPU, for the next start; empty is ~/.cache/tinsmith/compiled"
    )


@dataclass
class DistributedConfig:
    """Settings for several workers."""

    workers: int = setting(
        0,
        "Number of processes that train and sample, each on a GPU or a share of a CPU; "
        "0 is one for each visible GPU without a vLLM server, or one on a CPU",
        "workers",
        0,
        1024,
        common=True,
    )
    shard: str = setting(
        "auto",
        "How models are spread over GPUs: none, each GPU holds all of them; "
        "weights, each holds a slice of every layer (needs --sampler "
        "vllm or none); auto, weights only if a model does not fit otherwise",
        choices=("auto", "none", "weights"),
        common=True,
    )
    ray_address: str = setting(
        "",
        (
            "Ray cluster that runs the workers: auto for the one that runs here, or HOST:PORT of its head; "
            "empty starts them without Ray"
        ),
        choices=("auto", "HOST:PORT of Ray's head"),
        pattern=r"|auto|[^:/\s]+:[0-9]+",
    )


@dataclass
class ImagesConfig:
    """Limits and caches for images, which are untrusted input."""

    max_image_mib: float = setting(20.0, "Maximum size of an encoded image", "MiB", 0.001)
    max_image_pixels: int = setting(50_000_000, "Maximum number of pixels of an image, by its header", "pixels", 1)
    max_input_pixels: int = setting(
        200_000_000, "Maximum number of pixels of all images in one prompt or datum, by their headers", "pixels", 1
    )
    max_aspect: float = setting(200.0, "Maximum ratio of the longer side of an image to the shorter one", "", 1)
    image_cache_mib: int = setting(
        512, "Memory for pixel values and vision features of images, for repeated ones", "MiB", 0
    )


@dataclass
class TrainingConfig:
    """Settings for training, in the engine and the workers."""

    train: str = setting(
        "any",
        "What clients may train: any, adapters and all weights; none, nothing: "
        "no memory is planned for it, and the server samples base "
        "models and checkpoints, also those that another server writes to --checkpoint-root",
        choices=("any", "none"),
        common=True,
    )
    tokens_per_pass: int = setting(
        8192, "Maximum number of tokens packed into one forward or backward pass", "tokens", 1, common=True
    )
    logits_chunk: int = setting(
        1024,
        "Number of positions whose logits are in memory at a time; fewer take less memory and more time",
        "tokens",
        1,
    )
    sequence_parallel_from: int = setting(
        0,
        "Length from which all workers compute a sequence together, a slice each; "
        "0 only does so if it is too long for one. Needs --workers 2 or more",
        "tokens",
        0,
    )
    planned_models: int = setting(
        0,
        (
            "Number of models in training for which an automatic cache (--kv-cache-gib 0) leaves room; "
            "0 is four with LoRA, else one"
        ),
        "models",
        0,
        common=True,
    )
    planned_rank: int = setting(32, "LoRA rank of the planned models; 0 trains all parameters", "", 0, common=True)
    full_state: str = setting(
        "float32",
        "What training of all parameters (rank 0) keeps beside the weights: float32, exact; "
        "compact, in half of the memory, with moments in 8 bits and gradients in the base's precision; "
        "compact-host, the same, with all that a pass does not need in host memory",
        choices=("float32", "compact", "compact-host"),
    )
    paged_state_share: float = setting(
        0.25,
        "Share of the host memory that is free at the start, in which LoRA models wait while a GPU has no room for "
        "their training state; those that were used least recently leave it. 0 keeps all on the GPU. "
        "At most half, as inputs of layers may take the other",
        "",
        0,
        0.5,
    )
    ended_model_ttl_s: float = setting(
        604800.0, "How long to keep the checkpoint of a model that the server has unloaded", "seconds", 0.1
    )
    replay_s: float = setting(
        5.0,
        "Maximum time to compute again what models had computed since their last copies, after a worker has died; "
        "with less there are more copies. 0 copies after every step",
        "seconds",
        0,
    )
    kept_copies_gib: float = setting(
        32.0,
        "Disk space of all workers for copies that restore models and optimizers after a worker has died; "
        "a model without one is computed again from its last save, or lost if that takes over 300 s. 0 keeps none",
        "GiB",
        0,
    )
    max_unrecorded_mib: float = setting(
        256.0, "Maximum size of results in memory while the database cannot be written; then training waits", "MiB", 0
    )
    held_operation_s: float = setting(
        600.0, "How long an operation waits for one of a lower seq_id to arrive; then it fails", "seconds", 0.1
    )

    @property
    def trains(self) -> bool:
        """Whether clients may train anything."""
        return self.train != "none"


@dataclass
class SamplingConfig:
    """Settings for sampling."""

    sampler: str = setting(
        "local",
        (
            "What samples: local, the worker itself with the weights it trains; vllm, vLLM servers; "
            "none, sample requests are refused"
        ),
        choices=("local", "vllm", "none"),
        common=True,
    )
    kv_cache_gib: float = setting(
        0.0,
        (
            "Memory of the local sampler's cache for each base model; 0 is what planned training leaves of a GPU, "
            "and 2 GiB on a CPU"
        ),
        "GiB",
        0,
        common=True,
    )
    snapshot_gib: float = setting(
        4.0, "Memory for sampled weights in each worker; when full, the least recently sampled move to disk", "GiB", 0
    )
    snapshot_disk_gib: float = setting(
        32.0,
        "Disk space for snapshots, shared equally by the workers that sample; "
        "when full, the least recently sampled are deleted, except each model's newest and those in use",
        "GiB",
        0,
    )
    snapshot_idle_h: float = setting(
        24.0, "Delete a snapshot that is not sampled for this long, unless it is its model's newest", "hours", 0.0001
    )
    recorded_sequences_gib: float = setting(
        4.0,
        (
            "Disk space for samples with record_stability_info, for the loss stable_reinforce; "
            "when full, the least recently used go"
        ),
        "GiB",
        0.0001,
    )
    recorded_routes_gib: float = setting(
        1.0,
        (
            "Memory of the server for the experts that computed sampled tokens, which losses with logprobs follow; of "
            "Qwen3-30B-A3B 384 bytes a token; 0 records and follows none; "
            "when full, the oldest of the training run that has most of them go"
        ),
        "GiB",
        0,
    )
    max_running: int = setting(256, "Maximum number of sequences decoded together", "sequences", 1)
    prefill_tokens: int = setting(4096, "Maximum number of prompt tokens in one step", "tokens", 1)
    eager: bool = setting(False, "Run without CUDA graphs: slower, but errors name the failed operation")
    prefill_tokens_beside: int = setting(
        2048, "Maximum number of prompt tokens in one step that decodes sequences too, and makes them wait", "tokens", 1
    )


@dataclass
class VLLMConfig:
    """Settings for vLLM servers, with sampler=vllm."""

    vllm_servers: int = setting(
        1, "Number of vLLM servers to start for each base model; not used with --vllm-url", "servers", 1, 64
    )
    vllm_tensor_parallel: int = setting(
        1,
        "Number of GPUs, or processes on a CPU, that share the base model of a vLLM server; not used with --vllm-url",
        "GPUs",
        1,
        64,
    )
    vllm_urls: list[str] = setting([], "URL of a running vLLM server to use; none is started then; repeat for several")
    vllm_python: str = setting("", "Python of vLLM's environment; empty is the one that runs Tinsmith")
    vllm_args: list[str] = setting(
        [], "Argument for started vLLM servers, such as --vllm-arg=--max-loras=8; repeat for several"
    )
    vllm_transfer: str = setting(
        "auto",
        "How full weights get into started vLLM servers: file, through a file in memory; "
        "ipc, through the memory of a shared GPU; "
        "broadcast, from GPU to GPU; auto, as this machine allows",
        choices=("auto", "file", "ipc", "broadcast"),
    )
    vllm_turn_s: float = setting(
        0.0,
        "Let trainer and vLLM servers share one GPU in turns of at most this length, each with nearly all of its "
        "memory. 0 divides the memory",
        "seconds",
        0,
    )
    vllm_hung_s: float = setting(
        120.0,
        "Restart a busy vLLM server after this many silent seconds; must exceed the time to transfer weights",
        "seconds",
        1,
    )
    vllm_dir: str = setting(
        "", "Directory for weights that vLLM servers load, readable by all of them; empty keeps these in memory"
    )


@dataclass
class Config:
    """All settings of a server."""

    base_models: list[str] = setting(
        [], "Base model to serve, as [NAME=]PATH_OR_HUB_ID; repeat for several", common=True
    )
    data_dir: str = setting(
        "tinsmith-data", "Directory of database, checkpoints and all else that survives a restart", common=True
    )
    database_url: str = setting(
        "",
        "PostgreSQL database of this data directory, such as postgresql+psycopg://USER@HOST/NAME; the directory keeps "
        "it, for other commands and later starts. Empty is a SQLite file in it",
        common=True,
    )
    checkpoint_root: str = setting(
        "",
        (
            "Where to write new checkpoints: a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX; "
            "empty is inside the data directory"
        ),
        common=True,
    )
    log_level: str = setting(
        "info",
        "Least important lines to log: debug (adds a line for each sample), info, warning or error",
        choices=LEVELS,
        common=True,
    )
    log_format: str = setting(
        "text", "Form of log lines: text, or json with session, model and request of each", choices=FORMATS
    )
    server: ServerConfig = field(default_factory=ServerConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)

    @property
    def shards_weights(self) -> bool:
        """Whether workers shard the base models' layers; `memory/shard_choice.py` resolves `auto` before they start."""
        return self.distributed.shard == "weights"

    @property
    def only_compares(self) -> bool:
        """Whether the worker only compares what vLLM servers compute."""
        return self.sampling.sampler == "vllm" and not self.training.trains

    @property
    def compares_with_copy(self) -> bool:
        """Whether vLLM servers are compared with whole base models, because training workers shard theirs."""
        return self.sampling.sampler == "vllm" and self.shards_weights and self.training.trains

    @property
    def vllm_gpus(self) -> int:
        """Number of GPUs that only vLLM servers use, over all base models."""
        if self.sampling.sampler != "vllm" or self.vllm.vllm_urls or self.vllm.vllm_turn_s:
            return 0
        return max(1, len(self.base_models)) * self.vllm.vllm_servers * self.vllm.vllm_tensor_parallel


def settings() -> Iterator[Setting]:
    """All settings with their defaults, in order."""
    return settings_of(Config())


def load(
    file: Path | None = None,
    options: Mapping[str, Any] = types.MappingProxyType({}),
    environment: Mapping[str, str] = types.MappingProxyType({}),
) -> Config:
    """The defaults, overridden by the YAML file, environment variables, and `options`, values by setting name.

    An empty variable counts as not set. Raises ConfigError for an unreadable file, an unknown key, variable or option,
    and as `checked`.
    """
    config = Config()
    if file is not None:
        fill(config, read_yaml(file), str(file))
    fill_from_environment(config, {name: text for name, text in environment.items() if name != CONFIG_VARIABLE})
    names = {each.name: each for each in settings()}
    for name, value in options.items():
        if name not in names:
            raise ConfigError(f"unknown option {name!r}; the options are {', '.join(names)}")
        put(config, names[name], value, f"command line: {names[name].option}")
    return config


def base_model_sources(config: Config) -> dict[str, str]:
    """The source of every base model by name: an absolute path or a Hub id, which is the name without NAME=.

    Raises ConfigError: no base model, two of the same name, an impossible name, or no such directory.
    """
    if not config.base_models:
        raise ConfigError("no base model to serve; give at least one --base-model [NAME=]PATH_OR_HUB_ID")
    sources: dict[str, str] = {}
    for spec in config.base_models:
        name, source = base_model_source(spec)
        if name in sources:
            raise ConfigError(f"base_models: two have the name {name!r}; tell them apart with NAME=PATH_OR_HUB_ID")
        sources[name] = source
    return sources


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, for other processes."""
    return dataclasses.asdict(config)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """The inverse of `to_tree`. Raises ConfigError as `load` does."""
    config = Config()
    fill(config, tree, "configuration")
    return config
