"""Which prompt a group plays: numbers of groups -> prompts, shuffled anew for every pass."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.errors import ConfigError
from tinsmith.rl.env import Prompt


def seeds(first: int, count: int) -> list[Prompt]:
    """Prompts that differ in their seed only."""
    return [Prompt(seed) for seed in range(first, first + count)]


def rows(file: Path, count: int) -> list[Prompt]:
    """The first `count` rows of a JSONL file, each {"messages": [...], "fields": {...}}; a row's number is its seed.

    Raises ConfigError for a file that is not there, is empty or holds something else.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            return [_prompt(file, number, json.loads(line)) for number, line in enumerate(islice(lines, count))]
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {file}: {error}") from error


def shuffled(prompts: Sequence[Prompt], number: int, seed: int) -> Prompt:
    """The prompt of group `number`: every pass over the prompts has an order of its own."""
    epoch, place = divmod(number, len(prompts))
    return prompts[int(np.random.default_rng([seed, epoch]).permutation(len(prompts))[place])]


def _prompt(file: Path, number: int, row: Any) -> Prompt:
    if not isinstance(row, dict) or set(row) - {"messages", "fields"}:
        raise ConfigError(f"{file}, row {number + 1}: a prompt has the keys messages and fields, got {row!r:.200}")
    return Prompt(number, tuple(row.get("messages", ())), row.get("fields", {}))
