"""The prompts of a run: seeds, or the rows of a file, and their order."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith_rl.env import Prompt
from tinsmith_rl.errors import ConfigError, config_error


def prompts_of(file: str, seed: int, count: int, seeds: int) -> list[Prompt]:
    """The first `count` rows of `file`, or prompts of as many seeds from `seed` on.

    With 0 these are all rows, or `seeds` seeds.
    """
    return file_prompts(Path(file), count) if file else seed_prompts(seed, count or seeds)


def seed_prompts(first: int, count: int) -> list[Prompt]:
    """Prompts that differ in their seed only."""
    return [Prompt(seed) for seed in range(first, first + count)]


def file_prompts(file: Path, count: int) -> list[Prompt]:
    """The first `count` rows of a JSONL file, or all with 0, each {"messages": [...], "fields": {...}}.

    A prompt's seed is its row.

    Raises ConfigError if the file does not exist, is empty or holds something else.
    """
    with config_error(f"cannot read the prompts in {file}", OSError, ValueError), file.open(encoding="utf-8") as lines:
        prompts = [_prompt(file, number, json.loads(line)) for number, line in enumerate(islice(lines, count or None))]
    if not prompts:
        raise ConfigError(f"there are no prompts in {file}: it is empty")
    return prompts


def _prompt(file: Path, number: int, row: Any) -> Prompt:
    if not isinstance(row, dict) or set(row) - {"messages", "fields"}:
        raise ConfigError(f"{file}, row {number + 1}: a prompt has the keys messages and fields, got {row!r:.200}")
    messages, fields = row.get("messages", []), row.get("fields", {})
    if (
        not isinstance(messages, list)
        or not all(isinstance(message, dict) for message in messages)
        or not isinstance(fields, dict)
    ):
        raise ConfigError(
            f"{file}, row {number + 1}: messages is a list of messages, and fields an object, got {row!r:.200}"
        )
    return Prompt(number, tuple(messages), fields)


def prompt_of_group(prompts: Sequence[Prompt], group: int, seed: int) -> Prompt:
    """The prompt of a group, by its number. Every pass over the prompts has its own order."""
    epoch, place = divmod(group, len(prompts))
    return prompts[int(np.random.default_rng([seed, epoch]).permutation(len(prompts))[place])]
