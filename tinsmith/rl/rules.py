"""How episodes are played, from the configuration: the same for training and evaluation."""

from tinsmith.rl.config import RlConfig
from tinsmith.rl.generator import Rules
from tinsmith.rl.policy import Request


def rules_of(config: RlConfig, max_context: int) -> Rules:
    """The rules of a run."""
    section = config.generation
    request = Request(section.max_tokens, section.temperature, section.top_p, section.top_k, tuple(section.stop))
    ends = section.end_turn_after_stop_string
    return Rules(request, section.max_turns, max_context, config.training.seed, ends, section.context_turns)
