"""Rollouts as a configuration describes them: of our environments, or of the cookbook's."""

from collections.abc import Mapping
from typing import Any

from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.config import RlConfig
from tinsmith_rl.errors import config_error
from tinsmith_rl.policy import SamplingRequest
from tinsmith_rl.rollouts import EnvRollouts, Rollouts, RolloutSettings
from tinsmith_rl.workers import Workers


def rollout_settings(config: RlConfig, max_context: int, template: ChatTemplate) -> RolloutSettings:
    """The settings of a run, for a server whose sequences have at most `max_context` tokens."""
    section = config.generation
    request = SamplingRequest(
        section.max_tokens, section.temperature, section.top_p, section.top_k, tuple(section.stop)
    )
    end_turn = section.end_turn_after_stop_string
    longest = max_context - _reserved_tokens(config, template)
    return RolloutSettings(
        request,
        section.max_turns,
        longest,
        config.training.seed,
        end_turn,
        section.context_turns,
        thought=config.warmup.thought,
    )


def _reserved_tokens(config: RlConfig, template: ChatTemplate) -> int:
    """Tokens of the context that no answer may take: those put behind it, and one for vLLM.

    It samples that one when it scores an answer of top_p or top_k.
    """
    section = config.generation
    tail = len(template.end_of_turn_ids) if section.stop and section.end_turn_after_stop_string else 0
    scored = section.top_p < 1 or section.top_k > 0
    return tail + scored


def make_rollouts(
    config: RlConfig, options: Mapping[str, Any], settings: RolloutSettings, template: ChatTemplate, workers: Workers
) -> Rollouts:
    """Rollouts of the environment that the configuration names.

    Raises ConfigError if it needs a package that is not installed.
    """
    if config.env.kind == "env":
        return EnvRollouts(config.env.name, options, settings, template, workers, config.generation.in_flight)
    with config_error(
        "env: kind=cookbook needs the package tinker_cookbook", ImportError, remedy="pip install tinker-cookbook"
    ):
        from tinsmith_rl.adapters.cookbook import CookbookRollouts
    return CookbookRollouts(config.env.name, options, settings, template, config.generation.in_flight)
