"""The record of an episode: its turns, the samples to train on that are made of them, and the finished trajectory.

A turn whose prompt begins with everything that was seen and sampled before continues the sample; any other turn begins
a new one. So an episode is one sample where the chat template only appends, and several where it drops earlier
reasoning. All classes are frozen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import tinker
from numpy.typing import NDArray

from tinsmith_rl.sequences import TokenSequence, concatenate, text_sequence

StopReason = Literal["done", "length", "context", "max_turns", "empty", "env_error", "env_timeout"]
"""The reason why an episode ended.

done: the environment said so. length: an answer reached the limit on its tokens. context: no room was left for another
answer. max_turns: the limit on turns was reached. empty: the first answer had no tokens. env_error: the environment
raised, or returned a wrong value. env_timeout: a call into the environment took too long.
"""

STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)

TRUNCATED: frozenset[StopReason] = frozenset({"length", "context"})
"""The episode was cut because it was too long."""

FAILED: frozenset[StopReason] = frozenset({"env_error", "env_timeout"})
"""The environment's code failed."""


@dataclass(frozen=True)
class Turn:
    """One answer of the policy, and the reward that the environment gave for it.

    Example: the prompt "What is 3 + 4?", the sampled ids of "7<|im_end|>" with two logprobs, reward 1.0.
    """

    prompt: TokenSequence
    """Exactly what the model saw."""
    sampled: NDArray[np.int32]
    """[s] exactly what the model sampled, including the token that ended the answer; may be empty."""
    logprobs: NDArray[np.float32]
    """[s] the sampler's logprobs, at the temperature of the request."""
    reward: float
    """The environment's reward for this turn."""
    tail: tuple[int, ...] = ()
    """Tokens behind the answer that were not sampled: the end of turn after a stop string."""
    sequence_id: str = ""
    """The server's name for the answer."""


@dataclass(frozen=True)
class TrainingSample:
    """A sequence to train on: a prompt, and a response of sampled answers and the environment's messages in turn.

    Example: response_ids [7, 2, 5, 5, 9, 2] with loss_mask [1, 1, 0, 0, 1, 1]: two turns of two tokens, two between.
    """

    sequence: TokenSequence
    """Prompt and response with their images; [p + r] tokens."""
    prompt_length: int
    """p"""
    loss_mask: NDArray[np.bool_]
    """[r] true exactly where a token was sampled."""
    rewards: NDArray[np.float64]
    """[r] each turn's reward on its last sampled token, else 0.0."""
    logprobs: NDArray[np.float32]
    """[r] the sampler's logprobs, 0.0 where nothing was sampled."""
    is_last_step: bool
    """Whether the episode ends with this sample."""
    answers: tuple[tuple[str, int, int], ...] = ()
    """The server's name for each answer that is not empty, and where in the sequence it begins and ends."""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.rewards), len(self.logprobs)}
        assert len(lengths) == 1, f"a sample's arrays have different lengths: {lengths}"

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[p] positions of images hold the placeholder's id."""
        return self.sequence.ids[: self.prompt_length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """[r] sampled tokens, and the environment's messages between them."""
        return self.sequence.ids[self.prompt_length :]

    @property
    def model_input(self) -> tinker.ModelInput:
        """Prompt and response in the SDK's form."""
        return self.sequence.model_input


@dataclass(frozen=True)
class EpisodeId:
    """The episode that a trajectory records."""

    env: str
    seed: int
    """Seed of the prompt."""
    group: int = 0
    """Number of the group in the run."""
    member: int = 0
    """Place within the group."""
    version: int = 0
    """Number of training steps behind the weights that were sampled."""


@dataclass(frozen=True)
class Trajectory:
    """A finished episode. `samples` is empty if there is nothing to learn from it: it is counted and dropped."""

    episode: EpisodeId
    samples: tuple[TrainingSample, ...]
    """One, or several where the chat template does not only append."""
    stop_reason: StopReason
    turns: int
    """The number of answers that were sampled."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers about the episode."""
    error: str = ""
    """The failure of the environment, in one line; empty if there was none."""
    details: str = ""
    """The failure with its traceback, if there is one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage: "sample", "env"."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """The metadata that the environment's `init` returned, for the log."""

    @cached_property
    def reward(self) -> float:
        """The sum of all rewards, rounded once: it does not depend on how they were spread over turns."""
        return math.fsum(reward for sample in self.samples for reward in sample.rewards.tolist())

    @cached_property
    def sampled_tokens(self) -> int:
        return int(sum(sample.loss_mask.sum() for sample in self.samples))

    @property
    def usable(self) -> bool:
        """Whether it says something about the model: something was sampled, and the environment did not fail."""
        return bool(self.samples) and not self.failed

    @property
    def failed(self) -> bool:
        return self.stop_reason in FAILED

    @property
    def truncated(self) -> bool:
        return self.stop_reason in TRUNCATED


def assemble(turns: Sequence[Turn]) -> tuple[TrainingSample, ...]:
    """The samples of an episode, in order; none if its first answer is empty.

    The reward of a later turn with an empty answer is added to the last sampled token before it.
    """
    turns = _with_rewards_moved(turns)
    chains: list[list[Turn]] = []
    for turn in turns:
        if chains and turn.prompt.begins_with(chains[-1][-1].prompt + text_sequence(chains[-1][-1].sampled)):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    sampled = [chain for chain in chains if any(len(turn.sampled) for turn in chain)]
    return tuple(_sample(chain, is_last_step=chain is sampled[-1]) for chain in sampled)


def _with_rewards_moved(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, each empty answer's reward moved to the last earlier turn with tokens; [] if the first is empty."""
    moved: list[Turn] = []
    last = None
    for turn in turns:
        if len(turn.sampled):
            last = len(moved)
            moved.append(turn)
        elif last is None:
            return []
        else:
            moved[last] = replace(moved[last], reward=moved[last].reward + turn.reward)
            moved.append(replace(turn, reward=0.0))
    return moved


def _sample(chain: Sequence[Turn], is_last_step: bool) -> TrainingSample:
    """One sample of turns that continue each other."""
    while not len(chain[-1].sampled):  # the prompts of empty answers at the end teach nothing
        chain = chain[:-1]
    end = chain[-1]
    prompt_length = len(chain[0].prompt)
    sequence = concatenate((end.prompt, text_sequence(end.sampled), text_sequence(end.tail)))  # [p + r]
    answers = [
        (turn.sequence_id, len(turn.prompt), len(turn.prompt) + len(turn.sampled))
        for turn in chain
        if len(turn.sampled)
    ]
    loss_mask = np.zeros(len(sequence) - prompt_length, dtype=np.bool_)  # [r]
    rewards, logprobs = np.zeros(len(loss_mask), dtype=np.float64), np.zeros(len(loss_mask), dtype=np.float32)
    for turn in chain:
        start = len(turn.prompt) - prompt_length
        stop = start + len(turn.sampled)
        loss_mask[start:stop], logprobs[start:stop] = True, turn.logprobs
        if stop > start:
            rewards[stop - 1] = turn.reward
    return TrainingSample(sequence, prompt_length, loss_mask, rewards, logprobs, is_last_step, tuple(answers))
