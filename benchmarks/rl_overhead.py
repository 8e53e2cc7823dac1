"""CPU time of `tinsmith_rl` itself in 256 trajectories of three turns with an image each, with a tiny model.

The episodes are played on the server once, then again with the recorded answers. The CPU time of the second time is all
that our side does: environment, images, chat template, samples (the SDK takes no part). It is printed as a share of the
first time's wall time, with the training sequences per trajectory, and how often the server's renderer processes each
image on its way through all prompts and training sequences. Not measured: the trainer's side, where making datums is
all that is ours.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import tinker
from transformers import AutoTokenizer

from benchmarks.servers import API_KEY
from benchmarks.timing import report
from tests.bases import load, renderer
from tests.rl.scripted import chunk_of
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith.rendering.processor import LocalProcessor
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.datums import likelihood_datum
from tinsmith_rl.env import Prompt
from tinsmith_rl.policy import Completion, Policy, SamplingRequest, TinkerPolicy
from tinsmith_rl.rollouts import EnvRollouts, RolloutSettings
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import InlineWorkers

TRAJECTORIES, TURNS = 256, 3


@dataclass
class Recorder:
    """Remembers a policy's answers by the seed of the request."""

    policy: Policy
    answers: dict[int, Completion] = field(default_factory=dict)
    prompts: list[tinker.ModelInput] = field(default_factory=list)

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        """The policy's answer, as one that ended by itself: a random model does not know how to stop."""
        self.prompts.append(prompt)
        made = await self.policy.complete(prompt, request)
        assert request.seed is not None
        self.answers[request.seed] = Completion(made.tokens, made.logprobs, stopped=True)
        return self.answers[request.seed]


@dataclass(frozen=True)
class Replay:
    """Gives the recorded answers."""

    answers: dict[int, Completion]

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        """What was answered then."""
        assert request.seed is not None
        return self.answers[request.seed]


def play_all(rollouts: EnvRollouts, policy: Policy, first_seed: int) -> list[Trajectory]:
    """Every trajectory, all at once."""
    made: list[Trajectory] = []

    async def play() -> None:  # returns nothing: asyncio.run formats what it returns
        episodes = [EpisodeId(rollouts.env, first_seed + number, number) for number in range(TRAJECTORIES)]
        made.extend(
            await asyncio.gather(*(rollouts.play(policy, Prompt(episode.seed), episode) for episode in episodes))
        )

    asyncio.run(play())
    return made


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    wall_s: float
    """With the server."""
    ours_s: float
    """Of the processor, without it."""
    sequences: float
    """Training sequences per trajectory."""
    inputs: list[tinker.ModelInput]
    """Everything that the server sees: prompts and training sequences."""


def measure(url: str, template: ChatTemplate) -> Costs:
    """Play with the server, then with the recorded answers."""
    settings = RolloutSettings(SamplingRequest(max_tokens=8), max_turns=TURNS, max_context=1024)
    rollouts = EnvRollouts("digit_sum", {"turns": TURNS, "scans": 1}, settings, template, InlineWorkers(60.0))
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        recorder = Recorder(TinkerPolicy(service.create_sampling_client(base_model="tiny").result()))
        start = time.perf_counter()
        played = play_all(rollouts, recorder, first_seed=0)
        wall = time.perf_counter() - start
    start = time.process_time()
    # Images that nobody has encoded yet
    replayed = play_all(rollouts, Replay(recorder.answers), first_seed=TRAJECTORIES)
    assert [trajectory.turns for trajectory in replayed] == [TURNS] * TRAJECTORIES
    assert all(
        (a.samples[0].sequence.ids == b.samples[0].sequence.ids).all() for a, b in zip(played, replayed, strict=True)
    )
    ours = time.process_time() - start
    samples = [sample for trajectory in played for sample in trajectory.samples]
    return Costs(
        wall,
        ours,
        len(samples) / TRAJECTORIES,
        recorder.prompts + [likelihood_datum(sample).model_input for sample in samples],
    )


def processed(inputs: list[tinker.ModelInput], model: Path) -> float:
    """How often the server's renderer processes each image of the inputs, on average."""
    render = renderer(load(model))
    with patch.object(LocalProcessor, "__call__", autospec=True, side_effect=LocalProcessor.__call__) as processing:
        for model_input in inputs:
            render.render([chunk_of(chunk) for chunk in model_input.chunks])
    seen = [call.args[1] for call in processing.call_args_list]  # digests
    return len(seen) / len(set(seen))


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model("qwen3-vl", model)
        template = ChatTemplate.for_tokenizer(AutoTokenizer.from_pretrained(str(model)))
        with serving(Path(folder), "--base-model", f"tiny={model}", "--kv-cache-gib", "0.25") as server:
            server.wait_for_health()
            costs = measure(server.url, template)
        times = processed(costs.inputs, model)
    report("rl_overhead", costs.ours_s / costs.wall_s, "at most 0.05", wall_s=costs.wall_s, processor_s=costs.ours_s)
    report("rl_sequences_per_trajectory", costs.sequences, "1")
    report("rl_times_an_image_is_processed", times, "1")


if __name__ == "__main__":
    main()
