"""How episodes are played and by whom, from the configuration: the same for training and evaluation."""

from collections.abc import Mapping
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import RlConfig
from tinsmith.rl.generator import Generator, Player, Rules
from tinsmith.rl.policy import Request
from tinsmith.rl.workers import Workers


def rules_of(config: RlConfig, max_context: int) -> Rules:
    """The rules of a run."""
    section = config.generation
    request = Request(section.max_tokens, section.temperature, section.top_p, section.top_k, tuple(section.stop))
    ends = section.end_turn_after_stop_string
    return Rules(request, section.max_turns, max_context, config.training.seed, ends, section.context_turns)


def make_player(config: RlConfig, options: Mapping[str, Any], rules: Rules, template: ChatTemplate, workers: Workers) -> Player:
    """The player of what the environment's name stands for. Raises ConfigError if its package is not installed."""
    if config.env.kind == "env":
        return Generator(config.env.name, options, rules, template, workers, config.generation.in_flight)
    try:
        from tinsmith.rl.adapters.cookbook import CookbookPlayer
    except ImportError as error:
        raise ConfigError(f"env: kind=cookbook needs the package tinker_cookbook: {error}; pip install tinker-cookbook") from error
    return CookbookPlayer(config.env.name, options, rules, template, config.generation.in_flight)
