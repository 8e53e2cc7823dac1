"""What the generator makes: turns, training samples and trajectories. All frozen; every array says its shape."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import tinker
from numpy.typing import NDArray

from tinsmith.rl.stream import TokenStream

StopReason = Literal["done", "length", "context", "max_turns", "empty", "env_error", "env_timeout"]
"""Why a trajectory ended: the environment was done; a generation reached its length; the conversation left no room for another one;
`max_turns` were played; the first generation was empty; the environment raised, or took too long."""

STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)

TRUNCATED: frozenset[StopReason] = frozenset({"length", "context"})
"""Endings by which a trajectory was cut for being long."""

FAILED: frozenset[StopReason] = frozenset({"env_error", "env_timeout"})
"""Endings that are the environment's fault."""


@dataclass(frozen=True)
class Turn:
    """One call of the policy and what the environment made of it.

    Example: the prompt "What is 3 + 4?", sampled ids of "7<|im_end|>" with two logprobs, reward 1.0.
    """

    prompt: TokenStream
    """Exactly what the model saw."""
    sampled: NDArray[np.int32]
    """[s] exactly what it said, the token that ended it included; may be empty."""
    logprobs: NDArray[np.float32]
    """[s] the sampler's, at the request's temperature."""
    reward: float
    """What the environment gave for this turn."""
    tail: tuple[int, ...] = ()
    """Tokens nobody sampled that close the turn (end of turn after a stop string)."""


@dataclass(frozen=True)
class Sample:
    """A sequence to train on: a prompt, and a response in which the model and the environment take turns.

    Example: response_ids [7, 2, 5, 5, 9, 2] with loss_mask [1, 1, 0, 0, 1, 1]: two turns of two sampled tokens with two between them.
    """

    stream: TokenStream
    """Prompt and response, with their pictures."""
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    """[r] true exactly where a token was sampled."""
    rewards: NDArray[np.float64]
    """[r] each turn's reward on its last sampled token, else 0.0."""
    logprobs: NDArray[np.float32]
    """[r] the sampler's logprobs, 0.0 where nothing was sampled."""
    turns: int
    """Turns merged into this sample."""
    is_last_step: bool
    """Whether the trajectory ends with this sample."""
    pixel_values: NDArray[np.float32] | None = None
    """[patches, patch_dim] of the stream's pictures, if asked for and there are any."""
    image_grid_thw: NDArray[np.int64] | None = None
    """[pictures, 3], if asked for and there are any."""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.rewards), len(self.logprobs)}
        assert len(lengths) == 1, f"a sample's arrays have different lengths: {lengths}"

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[p] positions of pictures hold the placeholder's id."""
        return self.stream.ids[: self.prompt_length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """[r] sampled tokens and what the environment said in between."""
        return self.stream.ids[self.prompt_length :]

    @property
    def model_input(self) -> tinker.ModelInput:
        """Prompt and response as the SDK takes them."""
        return self.stream.model_input


@dataclass(frozen=True)
class Origin:
    """Which episode a trajectory is."""

    env: str
    seed: int
    """The prompt's."""
    group: int = 0
    """Number of its group in the run."""
    member: int = 0
    """Its place in the group."""
    version: int = 0
    """Optimizer steps that the weights had seen which it was sampled from."""


@dataclass(frozen=True)
class Trajectory:
    """A finished episode. `samples` is empty if nothing can be learnt from it: it is counted and dropped."""

    origin: Origin
    samples: tuple[Sample, ...]
    """One, or several where the chat template does not extend by suffix."""
    stop_reason: StopReason
    turns: int
    """Calls of the policy."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment says of the episode."""
    error: str = ""
    """Why the environment failed, in a line; empty if it did not."""
    details: str = ""
    """The same with the whole traceback, if there is one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage: "sample", "env"."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """The environment's metadata of `init`, for the log."""

    @cached_property
    def reward(self) -> float:
        """The whole reward, rounded once: the same rewards in other turns come to the same number."""
        return math.fsum(reward for sample in self.samples for reward in sample.rewards.tolist())

    @cached_property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model said."""
        return int(sum(sample.loss_mask.sum() for sample in self.samples))

    @property
    def usable(self) -> bool:
        """Whether it tells something about the model: something was sampled, and the environment did not fail."""
        return bool(self.samples) and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the environment ended it, by raising, by a wrong return value or by taking too long."""
        return self.stop_reason in FAILED

    @property
    def truncated(self) -> bool:
        """Whether it was cut for being long."""
        return self.stop_reason in TRUNCATED
