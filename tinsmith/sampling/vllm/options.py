"""Options that are passed on to vLLM servers with `--vllm-arg`: what we must know of them, and those that cannot work."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tinsmith.errors import ConfigError

DEFAULT_SHARE = 0.92
"""Of a GPU's memory, that vLLM takes unless it is told otherwise."""

_ONE_GPU = "a server sees one GPU: start more servers with --vllm-servers instead"
_ONE_PROCESS = "adapters are given to one process that takes requests"
_REFUSED = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), _ONE_GPU),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl", "--data-parallel-rank", "-dpn"), _ONE_GPU),
    **dict.fromkeys(
        ("--data-parallel-start-rank", "-dpr", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"), _ONE_GPU
    ),
    **dict.fromkeys(("--data-parallel-backend", "-dpb", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb"), _ONE_GPU),
    **dict.fromkeys(("-dpe", "--data-parallel-multi-port-external-lb", "-dpm", "--decode-context-parallel-size", "-dcp"), _ONE_GPU),
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp", "--enable-expert-parallel", "--device-ids"), _ONE_GPU),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"), _ONE_GPU),
    **dict.fromkeys(("--api-server-count", "-asc"), _ONE_PROCESS),
    "--config": "Tinsmith does not read that file, and must know what is in it: pass its options one by one",
}
"""Why each cannot work. A size or count of 1 is what vLLM does anyway."""
_SHORTEST_PREFIX = 8
"""vLLM takes the beginning of an option's name for the whole."""


def check_options(options: Sequence[str]) -> None:
    """Raise ConfigError for an option with which no server could start, or not as it is used here."""
    for name, value in _pairs(options):
        for refused, reason in _REFUSED.items():
            if (name == refused or (len(name) >= _SHORTEST_PREFIX and refused.startswith(name))) and value != "1":
                raise ConfigError(f"--vllm-arg={name}{'' if value is None else f'={value}'} ({refused}) cannot work: {reason}")


def value_of(options: Sequence[str], *names: str) -> str | None:
    """What the last of these options says; None where there is none of them."""
    values = [value for name, value in _pairs(options) if name in names]
    return values[-1] if values else None


def share_of(options: Sequence[str]) -> float:
    """Which part of a GPU's memory a server takes. Raises ConfigError for what is none."""
    value = value_of(options, "--gpu-memory-utilization", "--device-memory-utilization")
    try:
        share = DEFAULT_SHARE if value is None else float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--vllm-arg=--gpu-memory-utilization={value}: give the part of the GPU's memory, above 0 and up to 1")
    return share


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Name and value of each option, whether they are passed on together or one after the other."""
    for option, following in pairwise([*options, "-"]):
        if option.startswith("-"):
            name, equals, value = option.partition("=")
            yield name.replace("_", "-"), value if equals else None if following.startswith("-") else following
