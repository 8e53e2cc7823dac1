"""`adapter_config.json` of PEFT: rank and alpha of each layer, checked. What asks for more than plain LoRA is refused."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import UserError, quoted
from tinsmith.models.files import read_object

_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "target_parameters",
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
"""Values of PEFT's `init_lora_weights` that leave the base model as it is. With the others, such as "pissa", it is another one."""
_NAMES = r"(?:[\w-]|\\?\.|\\d\+?|\[0-9\]\+?)*"
_PLAIN_PATTERN = re.compile(rf"\^?{_NAMES}(?:\.\*|\((?:\?:)?(?:[\w|.-]|\\\.)+\))?{_NAMES}\$?")
"""Regular expressions that take little time on any name: names and numbers, with `.*` or alternatives once."""
_LONGEST_PATTERN, _MOST_PATTERNS = 200, 2000

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

    def rank_of(self, name: str) -> int:
        """The rank of a layer."""
        return int(_of_layer(name, self.ranks, self.rank))

    def scale_of(self, name: str) -> float:
        """What B·A of a layer is multiplied by."""
        rank = self.rank_of(name)
        return _of_layer(name, self.alphas, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def read_peft_config(file: Path) -> PeftConfig:
    """Raises ConfigError for a damaged file, and UserError for a value that cannot be used or more than plain LoRA."""
    config = read_object(file)
    wrong = [name for name in _UNSUPPORTED if config.get(name)] + (["bias"] if config.get("bias", "none") != "none" else [])
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
    )


def _rank(file: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{file}: {name}={quoted(value)} must be a whole number above 0; export the adapter again")
    return value


def _alpha(file: Path, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:  # which NaN is not
        return float(value)
    raise UserError(f"{file}: {name}={quoted(value)} must be a number above 0; export the adapter again")


def _pattern(file: Path, name: str, config: dict[str, Any], check: Callable[[Path, str, Any], float]) -> Pattern:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > _MOST_PATTERNS:
        raise UserError(f"{file}: {name}={quoted(pattern)} must be an object of at most {_MOST_PATTERNS} names; export the adapter again")
    for key in pattern:
        if len(key) > _LONGEST_PATTERN or not _PLAIN_PATTERN.fullmatch(key):
            raise UserError(
                f"{file}: {name} has {quoted(key)}, which is more than a name with \\d+ and one (a|b) or .*; write out the names"
            )
    return tuple((re.compile(rf"(.*\.)?({key})$"), check(file, f"{name}[{json.dumps(key)}]", value)) for key, value in pattern.items())


def _of_layer(name: str, pattern: Pattern, usual: float) -> float:
    """PEFT's setting for one layer: that of the first regular expression in its pattern that matches the end of the name, or the usual."""
    return next((value for key, value in pattern if key.match(name)), usual)
