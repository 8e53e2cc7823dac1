"""Every knob of a server, once: its name, type, default, unit and limits.

`tinsmith serve` makes one command-line option of each knob (`kv_cache_gib` becomes `--kv-cache-gib`), and a YAML file given with
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

from tinsmith.errors import ConfigError


def knob(
    default: Any, help: str, unit: str = "", low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """One documented configuration field. `low` and `high` are inclusive limits of a number; `choices` those of a text."""
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ServerConfig:
    """The HTTP side."""

    host: str = knob("127.0.0.1", "Address to listen on")
    port: int = knob(8000, "TCP port to listen on; 0 takes a free one and prints it", low=0, high=65535)
    long_poll_s: float = knob(30.0, "How long retrieve_future holds a request before it answers 408", "seconds", 0.1, 40)
    max_body_mib: int = knob(256, "Largest request body, after decompression", "MiB", 1, 4096)
    fwdbwd_max_chunk_len: int = knob(1024, "Largest number of datums the SDK puts into one forward_backward request", "datums", 1)
    sample_result_ttl_s: float = knob(600.0, "How long a finished sample waits to be fetched", "seconds", 1)
    max_pending_samples: int = knob(8192, "Samples accepted but not finished; one more is answered 429", "requests", 1)
    session_idle_s: float = knob(600.0, "A session without heartbeat and request for so long ends; its models are saved", "seconds", 0.1)
    result_ttl_s: float = knob(
        86400.0, "How long the result of a training operation waits to be fetched while its session lives", "seconds", 1
    )
    download_ttl_s: int = knob(3600, "How long the address of a file to download is valid", "seconds", 60, 604800)
    shutdown_s: float = knob(8.0, "How long Ctrl-C waits for the engine to finish the pass that is running", "seconds", 0.1)


@dataclass
class ModelsConfig:
    """How base models are loaded."""

    device: str = knob("auto", "Where the models run: auto, cpu, cuda or cuda:N (auto takes CUDA when there is one)")
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
    max_aspect: float = knob(200.0, "Largest ratio of an image's longer side to its shorter", "", 1)
    image_cache_mib: int = knob(512, "Memory for processed images (pixel values and vision features), by content hash", "MiB", 0)


@dataclass
class TrainingConfig:
    """The training side of the engine."""

    tokens_per_pass: int = knob(8192, "Most tokens packed into one forward or backward pass", "tokens", 1)
    logits_chunk: int = knob(1024, "Rows of logits that exist at one time while log-probabilities are computed", "tokens", 1)
    ended_model_ttl_s: float = knob(604800.0, "How long a model is kept as a checkpoint if its session just went away", "seconds", 0.1)
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
    max_running: int = knob(256, "Sequences decoded together", "sequences", 1)
    prefill_tokens: int = knob(4096, "Most prompt tokens computed in one step", "tokens", 1)


@dataclass
class VLLMConfig:
    """vLLM servers, with sampler=vllm."""

    vllm_servers: int = knob(1, "vLLM servers to start for each base model, unless --vllm-url names others", "servers", 1, 64)
    vllm_urls: list[str] = knob([], "Use the vLLM server at this address, and start none; repeat for several")
    vllm_python: str = knob("", "Python of the environment that vLLM is installed in, if it is not this one")
    vllm_args: list[str] = knob([], "One more option for vLLM servers that are started, as --vllm-arg=--max-loras=8; repeat for several")
    renderer: str = knob(
        "local", "Who processes pictures, for training too: local, this engine; vllm, its render endpoint", choices=("local", "vllm")
    )
    vllm_transfer: str = knob(
        "auto",
        "How full weights get into vLLM servers that are started: file, in memory; ipc, the memory of one GPU that both use; broadcast, "
        "from GPU to GPU (auto: what fits)",
        choices=("auto", "file", "ipc", "broadcast"),
    )
    vllm_hung_s: float = knob(
        120.0,
        "How long a vLLM server with samples to do may answer nothing before it is taken for lost; longer than a transfer takes",
        "seconds",
        1,
    )
    vllm_dir: str = knob("", "Where weights lie while vLLM servers use them, if not in memory: a directory that all of them can read")


@dataclass
class Config:
    """A whole server."""

    base_models: list[str] = knob([], "Base model to serve, as [NAME=]PATH_OR_HUB_ID; repeat for several")
    data_dir: str = knob("tinsmith-data", "Directory of the command log and everything else that outlives the process")
    checkpoint_root: str = knob("", "Where new checkpoints go, if not into data_dir: a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    server: ServerConfig = field(default_factory=ServerConfig)
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


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The tree in a YAML file. Raises ConfigError: unreadable, or no tree."""
    import yaml  # here, because `tinsmith --help` imports this module

    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections such as 'server:', not a {type(tree).__name__}")
    return tree


def fill(section: Any, values: Mapping[str, Any], source: str) -> None:
    """Set the fields of a section, and of the sections in it, from `values`; `source` names in messages where they come from.

    Raises ConfigError: unknown key, wrong type or value out of its limits.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(section)}
    hints = typing.get_type_hints(type(section))
    for name, value in values.items():
        if name not in specs:
            raise ConfigError(f"{source}: unknown key {name!r}; known here: {', '.join(specs)}")
        current = getattr(section, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {name} is a section and must hold keys, got {value!r}")
            fill(current, value, f"{source}: {name}")
        else:
            setattr(section, name, _checked(name, value, hints[name], specs[name].metadata, source))


def _checked(name: str, value: Any, kind: Any, limits: Mapping[str, Any], source: str) -> Any:
    if typing.get_origin(kind) is list:
        (item_kind,) = typing.get_args(kind)
        if not isinstance(value, list) or not all(isinstance(item, item_kind) for item in value):
            raise ConfigError(f"{source}: {name} must be a list of {'texts' if item_kind is str else 'numbers'}, got {value!r}")
        return value
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{source}: {name}={value!r} must be one of {', '.join(typing.get_args(kind))}")
        return value
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {name} must hold keys, got {value!r}")
        return value
    return _checked_scalar(name, value, kind, limits, source)


def _checked_scalar(name: str, value: Any, kind: Any, limits: Mapping[str, Any], source: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{source}: {name} must be of type {kind.__name__}, got {value!r}")
    low, high, choices = limits["low"], limits["high"], limits["choices"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ConfigError(f"{source}: {name}={value!r} must lie between {low} and {'any number' if high is None else high}")
    if choices and value not in choices:
        raise ConfigError(f"{source}: {name}={value!r} must be one of {', '.join(choices)}")
    return value
