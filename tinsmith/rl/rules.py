"""How episodes are played and by whom, from the configuration: the same for training and evaluation."""

from collections.abc import Mapping
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import RlConfig
from tinsmith.rl.generator import Generator, Player, Rules
from tinsmith.rl.policy import Request
from tinsmith.rl.workers import Workers


def rules_of(config: RlConfig, max_context: int, template: ChatTemplate) -> Rules:
    """The rules of a run on a server whose sequences have at most `max_context` tokens."""
    section = config.generation
    request = Request(section.max_tokens, section.temperature, section.top_p, section.top_k, tuple(section.stop))
    ends = section.end_turn_after_stop_string
    longest = max_context - _spare(config, template)
    return Rules(request, section.max_turns, longest, config.training.seed, ends, section.context_turns)


def _spare(config: RlConfig, template: ChatTemplate) -> int:
    """Tokens of the context that no answer may take: those put behind it, and the one with which a server that scores it goes on.

    The reference of a KL penalty scores whole sequences, and vLLM those that it sampled with top_p or top_k.
    """
    section = config.generation
    tail = len(template.end_of_turn_ids) if section.stop and section.end_turn_after_stop_string else 0
    scored = config.training.kl_coefficient > 0 or section.top_p < 1 or section.top_k > 0
    return tail + scored


def make_player(config: RlConfig, options: Mapping[str, Any], rules: Rules, template: ChatTemplate, workers: Workers) -> Player:
    """The player of what the environment's name stands for. Raises ConfigError if its package is not installed."""
    if config.env.kind == "env":
        return Generator(config.env.name, options, rules, template, workers, config.generation.in_flight)
    try:
        from tinsmith.rl.adapters.cookbook import CookbookPlayer
    except ImportError as error:
        raise ConfigError(f"env: kind=cookbook needs the package tinker_cookbook: {error}; pip install tinker-cookbook") from error
    return CookbookPlayer(config.env.name, options, rules, template, config.generation.in_flight)
