"""`Policy`: who answers a prompt. The generator knows nothing else of models, so a test or another library can be one as well."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import tinker
from numpy.typing import NDArray


@dataclass(frozen=True)
class Request:
    """How an answer is to be sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Texts that end the answer, beside the model's own end of turn."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in place of all else."""
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What was sampled."""

    tokens: NDArray[np.int32]
    """[s] with the token or tokens that ended it."""
    logprobs: NDArray[np.float32]
    """[s]"""
    stopped: bool
    """It ended by itself, not on its length."""


class Policy(Protocol):
    """Tokens and pictures in, tokens and logprobs out."""

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """One answer to `prompt`."""
        ...


class TinkerPolicy:
    """The model behind an SDK sampling client; whether the server samples with its own sampler or with vLLM makes no difference."""

    def __init__(self, client: tinker.SamplingClient) -> None:
        self.client = client

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """One answer to `prompt`."""
        params = tinker.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=list(request.stop_ids) or list(request.stop) or None,  # None is the model's own end; an empty list would be no end at all
            seed=request.seed,
        )
        reply = await self.client.sample(prompt, 1, params)
        sequence = reply.sequences[0]
        tokens = np.array(sequence.tokens, dtype=np.int32)
        return Answer(tokens, np.array(sequence.logprobs or [], dtype=np.float32), sequence.stop_reason == "stop")


def derived_seed(*parts: int) -> int:
    """A seed of 63 bits that follows from `parts`, such as run, group, member and turn."""
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def joined_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings from a configuration that has one or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop)
