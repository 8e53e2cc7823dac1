"""The folder of a PEFT adapter, and its `adapter_config.json`, checked. Only plain LoRA is taken."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import UserError, quoted
from tinsmith.models.files import read_header, read_object

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Options of PEFT that change what an adapter computes."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that leave the base model as it is; others, such as "pissa", change it."""
_NUMBER = r"(?:\\d|\[(?:[0-9](?:-[0-9])?)+\])\+?"
_LETTER = r"[\w-]|\\\.|\.(?!\*)|\[[A-Za-z_](?:-[A-Za-z])?(?:\w(?:-\w)?)*\]"
_PLAIN_PATTERN = re.compile(rf"\^?(?:{_LETTER}|{_NUMBER}|\.\*|\((?:\?:)?(?:[\w|.-]|\\\.)+\))*\$?")
"""Regular expressions of names, numbers, classes of characters, `.*` and alternatives.

With few of the last two such an expression takes little time on any name.
"""
_LONGEST_PATTERN, _MOST_PATTERNS = 200, 2000
_MOST_STARS, _MOST_WITH_STARS = 3, 8
"""`.*` in one pattern, and patterns that have more than one."""

_LARGEST_RANK = 10**6
"""No matrix of a model has so many rows."""

Pattern = tuple[tuple[re.Pattern[str], float], ...]


@dataclass(frozen=True)
class PeftConfig:
    """Rank and alpha of an adapter, and of the layers that have others."""

    rank: int
    alpha: float
    by_root: bool
    """Whether the scale is alpha / sqrt(rank), as rsLoRA has it, and not alpha / rank."""
    ranks: Pattern
    alphas: Pattern
    parameters: tuple[str, ...] = ()
    """Names of parameters, or ends of names, that PEFT adapts where they are and not as layers."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a layer, or of a parameter of experts."""
        return int(_of_layer(self._known_as(name), self.ranks, self.rank))

    def scale_of(self, name: str) -> float:
        """Return the factor of B·A of a layer, or of a parameter of experts."""
        rank = self.rank_of(name)
        alpha = _of_layer(self._known_as(name), self.alphas, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def _known_as(self, name: str) -> str:
        """What patterns are compared with: of a layer whose weight is one of `parameters`, the name of that."""
        weight = f"{name}.weight"
        return weight if any(f".{weight}".endswith(f".{parameter}") for parameter in self.parameters) else name


def require_peft(directory: Path) -> PeftConfig:
    """Return the configuration of a folder with the whole files of a PEFT adapter; reads no weights.

    Raises UserError for other files or more than plain LoRA, ConfigError for a damaged file.
    """
    if (directory / _PICKLED_FILE).is_file() and not (directory / WEIGHTS_FILE).is_file():
        raise UserError(
            f"{directory} holds {_PICKLED_FILE} and no {WEIGHTS_FILE}: save the adapter again with "
            "safe_serialization=True"
        )
    if not (directory / CONFIG_FILE).is_file() or not (directory / WEIGHTS_FILE).is_file():
        raise UserError(f"{directory} is no PEFT adapter: it must hold {CONFIG_FILE} and {WEIGHTS_FILE}")
    read_header(directory / WEIGHTS_FILE)  # which says what is damaged
    return read_peft_config(directory / CONFIG_FILE)


def read_peft_config(file: Path) -> PeftConfig:
    """Read the file.

    Raises ConfigError if it is damaged, UserError for a value that cannot be used or more than plain LoRA.
    """
    config = read_object(file)
    wrong = [name for name in _UNSUPPORTED if config.get(name)] + (
        ["bias"] if config.get("bias", "none") != "none" else []
    )
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        wrong.append(f"init_lora_weights={quoted(config['init_lora_weights'])}")
    if config.get("peft_type") != "LORA" or wrong:
        named = ", ".join(wrong) or f"peft_type={quoted(config.get('peft_type'))}"
        raise UserError(f"{file.parent}: {named} of PEFT cannot be used, only plain LoRA of one rank")
    return PeftConfig(
        _rank(file, "r", config.get("r")),
        _alpha(file, "lora_alpha", config.get("lora_alpha")),
        bool(config.get("use_rslora")),
        _pattern(file, "rank_pattern", config, _rank),
        _pattern(file, "alpha_pattern", config, _alpha),
        _parameters(file, config.get("target_parameters") or []),
    )


def _rank(file: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST_RANK:
        raise UserError(
            f"{file}: {name}={quoted(value)} must be a whole number from 1 to {_LARGEST_RANK:,}; "
            "export the adapter again"
        )
    return value


def _alpha(file: Path, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:  # which NaN is not
        return float(value)
    raise UserError(f"{file}: {name}={quoted(value)} must be a number above 0; export the adapter again")


def _parameters(file: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{file}: target_parameters={quoted(value)} must be a list of names; export the adapter again")
    return tuple(value)


def _pattern(file: Path, name: str, config: dict[str, Any], check: Callable[[Path, str, Any], float]) -> Pattern:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > _MOST_PATTERNS:
        raise UserError(
            f"{file}: {name}={quoted(pattern)} must be an object of at most {_MOST_PATTERNS} names; "
            "export the adapter again"
        )
    if sum(key.count(".*") > 1 for key in pattern) > _MOST_WITH_STARS:
        raise UserError(
            f"{file}: {name} has more than {_MOST_WITH_STARS} patterns with several .*; write out the names"
        )
    return tuple(
        (_compiled(file, name, key), check(file, f"{name}[{quoted(key)}]", value)) for key, value in pattern.items()
    )


def _compiled(file: Path, name: str, key: str) -> re.Pattern[str]:
    """Compile a pattern as PEFT does.

    Raises UserError if it could take long on some name, or is no regular expression.
    """
    plain = (
        len(key) <= _LONGEST_PATTERN
        and _PLAIN_PATTERN.fullmatch(key)
        and key.count(".*") <= _MOST_STARS
        and key.count("(") <= 1
    )
    try:
        if plain:
            return re.compile(rf"(.*\.)?({key})$")
    except re.error:  # a class such as [9-0]
        pass
    raise UserError(
        f"{file}: {name} has {quoted(key)}, a regular expression that is not used here, as others of its kind take for "
        f"ever; write out the names, or use no more than \\d, [0-9], {_MOST_STARS} times .* and one (a|b)"
    )


def _of_layer(name: str, pattern: Pattern, usual: float) -> float:
    """Return PEFT's setting for one layer: that of the first pattern that matches the end of the name, or the usual."""
    return next((value for key, value in pattern if key.match(name)), usual)
