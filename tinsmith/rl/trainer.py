"""The loop of a run: take a batch of groups, learn from it, publish the new weights; log, evaluate and save in between.

train(load(Path("config.yaml")))          or          tinsmith rl config.yaml
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import tinker
from rich.console import Console
from rich.text import Text

from tinsmith.rl.advantages import has_variance
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.checkpoints import Checkpoints
from tinsmith.rl.config import RlConfig, to_tree
from tinsmith.rl.connection import base_model_of, chat_template, connect, context_limit, load_tokenizer, policy_of, rest, training_client
from tinsmith.rl.env import Prompt
from tinsmith.rl.evaluation import Evaluator
from tinsmith.rl.failures import ENOUGH, Failures
from tinsmith.rl.generator import Player
from tinsmith.rl.groups import Counts, Group, GroupStream
from tinsmith.rl.learner import Learner
from tinsmith.rl.metrics import Metrics, trajectory_metrics
from tinsmith.rl.pages import write_jsonl, write_page
from tinsmith.rl.policy import Policy, TinkerPolicy
from tinsmith.rl.prompts import rows, seeds, shuffled
from tinsmith.rl.resume import only_run, record_settings, starting_state
from tinsmith.rl.rules import make_player, rules_of
from tinsmith.rl.run_state import RunState
from tinsmith.rl.trackers import Tracker, make_trackers
from tinsmith.rl.trajectory import Origin, Trajectory
from tinsmith.rl.warmup import warm_up
from tinsmith.rl.workers import Workers, make_workers


def train(config: RlConfig, console: Console | None = None) -> RunState:
    """A whole run, or the rest of one; returns its last state.

    Raises ConfigError for what cannot work, TooManyFailuresError for an environment that fails too often, and what the server answers to
    requests that fail.
    """
    with only_run(Path(config.output.directory)):
        return _train(config, console or Console())


def _train(config: RlConfig, console: Console) -> RunState:
    state = starting_state(config, console)
    directory = Path(config.output.directory)
    if state.step >= config.training.steps:
        done = f"the run in {directory} has done its {state.step} steps; raise training: steps to go on"
        console.print(Text(done), soft_wrap=True)
        return state
    workers = make_workers(config.env.workers, config.env.worker_count, config.env.timeout_s)
    trackers = make_trackers(config.output.trackers, directory, state.step, to_tree(config), console)
    with connect(config.server) as service:
        try:
            run = _prepared(config, service, workers, state, trackers, console)
            record_settings(config)
            return asyncio.run(run.steps())
        finally:
            workers.shutdown()
            for tracker in trackers:
                tracker.close()


def _prepared(
    config: RlConfig, service: tinker.ServiceClient, workers: Workers, state: RunState, trackers: Sequence[Tracker], console: Console
) -> "Run":
    """Everything that a run needs to go on from `state`; a new one is warmed up."""
    client = training_client(service, config.model, state.weights)
    template = chat_template(config.model, load_tokenizer(config.model.tokenizer) if config.model.tokenizer else client.get_tokenizer())
    base_model = config.model.base_model or base_model_of(client)
    max_context = config.generation.max_context or context_limit(config.server, base_model)
    reference = policy_of(service, config.training.kl_reference, base_model).client if config.training.kl_coefficient else None
    if not state.step and config.warmup.steps:
        losses = warm_up(client, config.env, config.warmup, template, config.generation.context_turns)
        console.print(f"warm-up: loss per token {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps", highlight=False)
    section = config.prompts
    prompts = rows(Path(section.file), section.count) if section.file else seeds(section.seed, section.count)
    rules = rules_of(config, max_context, template)
    player = make_player(config, config.env.options, rules, template, workers)
    evaluator = Evaluator(config, template, workers, max_context) if config.evaluation.every else None
    checkpoints = Checkpoints(client, rest(config.server), Path(config.output.directory), config.output.keep, state)
    state = replace(state, tokenizer=str(template.tokenizer.name_or_path))
    learner = Learner(client, config.training, reference)
    failures = Failures(config.env.name, config.env.max_failed_share, config.env.max_failed_groups)
    return Run(config, client, template, player, prompts, learner, evaluator, checkpoints, trackers, failures, state)


@dataclass
class Run:
    """A run at work."""

    config: RlConfig
    client: tinker.TrainingClient
    template: ChatTemplate
    player: Player
    prompts: Sequence[Prompt]
    learner: Learner
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    trackers: Sequence[Tracker]
    failures: Failures
    state: RunState
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the step at work, by stage."""

    async def steps(self) -> RunState:
        """All steps that are left."""
        training = self.config.training
        stream = GroupStream(
            play=self._play,
            batch=training.groups,
            staleness=self.config.staleness,
            in_order=training.mode != "async",
            wanted=self._wanted,
            most_draws=training.dynamic_sampling_limit * training.groups,
            next_number=self.state.next_group,
        )
        try:
            policy = await self._publish()
            if self.evaluator is not None and not self.state.step:
                self._log(-1, await self._evaluated(policy, 0))
            stream.publish(self.state.step, policy)
            for step in range(self.state.step, training.steps):
                await self._step(step, stream)
        finally:
            await stream.close()
        return self.state

    async def _step(self, step: int, stream: GroupStream) -> None:
        self.seconds.clear()
        start = time.perf_counter()
        with self._timed("wait"):
            groups = await stream.take()
        self.failures.judge(enough=1 if step + 1 == self.config.training.steps else ENOUGH)
        metrics = self._batch_metrics(groups, step, stream)
        if self.evaluator is None:
            await self._keep_if_best(metrics)  # before they change: the weights of this step, or older ones, have earned it
        with self._timed("learn"):
            metrics |= await self.learner.learn(groups, step)
        policy = await self._publish()
        self.state = replace(self.state, step=step + 1, next_group=max(self.state.next_group, *(group.number + 1 for group in groups)))
        if step + 1 < self.config.training.steps:
            stream.publish(step + 1, policy)
        if self.evaluator is not None and self._is_due(self.config.evaluation.every):
            metrics |= await self._evaluated(policy, step + 1)
        if self._is_due(self.config.output.trajectories_every):
            self._show(f"step-{step + 1:06d}", [trajectory for group in groups for trajectory in group.trajectories])
        saves = self._is_due(self.config.output.save_every, at_the_end=True)
        if saves:
            with self._timed("save"):
                self.state = await self.checkpoints.save_step(self.state)
        self.seconds["step"] = time.perf_counter() - start
        self._log(step, metrics | {f"seconds/{stage}": spent for stage, spent in self.seconds.items()})
        if saves:  # only now, so that a run that goes on from here has the metrics of every step before
            await self.checkpoints.record(self.state)

    def _is_due(self, every: int, at_the_end: bool = False) -> bool:
        """Whether what happens every so many steps, never if 0, is due after `state.step` of them. The last step always counts."""
        done = self.state.step
        if done == self.config.training.steps:
            return bool(every) or at_the_end
        return every > 0 and done % every == 0

    async def _play(self, number: int, version: int, policy: Policy) -> Group:
        prompt = shuffled(self.prompts, number, self.config.training.seed)
        origins = [Origin(self.player.env, prompt.seed, number, m, version) for m in range(self.config.training.group_size)]
        trajectories = await self.player.play_group(policy, prompt, origins)
        self.failures.count(trajectories)
        return Group(number, prompt, version, trajectories)

    def _wanted(self, group: Group) -> bool:
        return not self.config.training.dynamic_sampling or has_variance([trajectory.reward for trajectory in group.usable])

    async def _publish(self) -> Policy:
        with self._timed("publish"):
            return TinkerPolicy(await self.client.save_weights_and_get_sampling_client())

    def _batch_metrics(self, groups: Sequence[Group], step: int, stream: GroupStream) -> Metrics:
        metrics = trajectory_metrics([group.trajectories for group in groups])
        metrics["staleness"] = sum(step - group.version for group in groups) / len(groups)
        metrics["staleness_max"] = float(max(step - group.version for group in groups))
        metrics["groups_without_variance_replaced"] = float(stream.counts.without_variance)
        metrics["groups_stale_replaced"] = float(stream.counts.stale)
        stream.counts = Counts()
        return metrics

    async def _evaluated(self, policy: Policy, version: int) -> Metrics:
        assert self.evaluator is not None
        with self._timed("evaluate"):
            evaluation = await self.evaluator.evaluate(policy, version)
        self._show(f"evaluation-{version:06d}", evaluation.trajectories)
        await self._keep_if_best(evaluation.metrics)
        return {f"eval/{name}": value for name, value in evaluation.metrics.items()}

    async def _keep_if_best(self, metrics: Metrics) -> None:
        """Save the weights of `state.step` if none before them had so good a reward. Where every episode failed there is none."""
        best, has_reward = self.state.best_reward, metrics["dropped"] < metrics["trajectories"]
        if self.config.output.save_best and has_reward and (best is None or metrics["reward"] > best):
            self.state = await self.checkpoints.save_best(self.state, metrics["reward"])

    def _show(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        if not self.config.output.trajectories_every:
            return
        directory = Path(self.config.output.directory) / "trajectories"
        directory.mkdir(exist_ok=True)
        write_jsonl(directory / f"{name}.jsonl", trajectories, self.template)
        write_page(directory / f"{name}.html", trajectories[: self.config.output.page_trajectories], self.template, name)

    def _log(self, step: int, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start
