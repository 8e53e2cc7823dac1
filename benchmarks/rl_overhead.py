"""What `tinsmith.rl` itself costs: 256 trajectories of three turns with a picture each, against a server with a tiny model.

The episodes are played on the server once, and played again with the answers recorded. What the second time takes of the processor is all
that our side does: environment, pictures, chat template, samples (the SDK takes no part). It is printed as a share of the first time's wall
time, with the training sequences per trajectory. Not measured: the trainer's side, where making datums is all that is ours.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import tinker

from benchmarks.servers import API_KEY
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.connection import load_tokenizer
from tinsmith.rl.env import Prompt
from tinsmith.rl.generator import Generator, Rules
from tinsmith.rl.policy import Answer, Policy, Request, TinkerPolicy
from tinsmith.rl.trajectory import Origin, Trajectory
from tinsmith.rl.workers import InlineWorkers

TRAJECTORIES, TURNS = 256, 3


@dataclass
class Recorder:
    """Remembers a policy's answers by the seed of the request."""

    policy: Policy
    answers: dict[int, Answer] = field(default_factory=dict)

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """The policy's answer, as one that ended by itself: a random model does not know how to stop."""
        made = await self.policy.answer(prompt, request)
        assert request.seed is not None
        self.answers[request.seed] = Answer(made.tokens, made.logprobs, stopped=True)
        return self.answers[request.seed]


@dataclass(frozen=True)
class Replay:
    """Gives the recorded answers."""

    answers: dict[int, Answer]

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """What was answered then."""
        assert request.seed is not None
        return self.answers[request.seed]


async def play_all(generator: Generator, policy: Policy) -> list[Trajectory]:
    """Every trajectory, all at once."""
    origins = [Origin(generator.env, number, number) for number in range(TRAJECTORIES)]
    return list(await asyncio.gather(*(generator.play(policy, Prompt(origin.seed), origin) for origin in origins)))


def measure(url: str, template: ChatTemplate) -> tuple[float, float, float]:
    """Wall seconds with the server, processor seconds without it, training sequences per trajectory."""
    rules = Rules(Request(max_tokens=8), max_turns=TURNS, max_context=1024)
    generator = Generator("digit_sum", {"turns": TURNS, "scans": 1}, rules, template, InlineWorkers())
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        recorder = Recorder(TinkerPolicy(service.create_sampling_client(base_model="tiny").result()))
        start = time.perf_counter()
        played = asyncio.run(play_all(generator, recorder))
        wall = time.perf_counter() - start
    start = time.process_time()
    replayed = asyncio.run(play_all(generator, Replay(recorder.answers)))
    assert [trajectory.turns for trajectory in replayed] == [TURNS] * TRAJECTORIES
    assert all((a.samples[0].stream.ids == b.samples[0].stream.ids).all() for a, b in zip(played, replayed, strict=True))
    return wall, time.process_time() - start, sum(len(trajectory.samples) for trajectory in played) / TRAJECTORIES


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model("qwen3-vl", model)
        template = ChatTemplate.for_tokenizer(load_tokenizer(str(model)))
        with serving(Path(folder), "--base-model", f"tiny={model}", "--kv-cache-gib", "0.25") as server:
            server.wait_for_health()
            wall, ours, sequences = measure(server.url, template)
    print(
        f"{TRAJECTORIES} trajectories of {TURNS} turns with pictures: {wall:.1f} s, {ours:.2f} s of them in tinsmith.rl ({ours / wall:.1%})"
    )
    print(f"training sequences per trajectory: {sequences:.2f}")


if __name__ == "__main__":
    main()
