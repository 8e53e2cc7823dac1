"""The training loop: take a batch of groups, learn from it, publish the new weights; log, evaluate and save in between.

train(load(Path("config.yaml")))          or          tinsmith-rl config.yaml
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tinker
from rich.console import Console
from rich.text import Text

from tinsmith_rl.calls import MIN_EPISODES, FailureCounter
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.config import RlConfig, to_tree
from tinsmith_rl.configured_rollouts import make_rollouts, rollout_settings
from tinsmith_rl.datums import has_variance
from tinsmith_rl.env import Prompt, find
from tinsmith_rl.episode_files import DIRECTORY, EpisodeFiles, Lessons
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.evaluation import Evaluator
from tinsmith_rl.groups import Group, GroupStream
from tinsmith_rl.learner import Learner, by_place, warm_up
from tinsmith_rl.metrics import BatchWatch, Metrics, Tracker, batch_metrics, make_trackers
from tinsmith_rl.policy import (
    Policy,
    TinkerPolicy,
    WeightsLostError,
    base_model_of,
    chat_template,
    connect,
    context_limit,
    lost_something,
    open_policy,
    open_training_client,
    rest_client,
    tokenizer_of,
)
from tinsmith_rl.prompts import prompt_of_group, prompts_of
from tinsmith_rl.resume import METRICS, RunCheckpoints, RunState, home_of, locked, record_settings, starting_state
from tinsmith_rl.rollouts import EnvRollouts, Rollouts, task_group
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import Workers, make_workers

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""So many times may the server lose something at one step until the run ends."""

SHOWN_EVERY_S = 60.0
"""Seconds between two lines of a log file on what a long step is doing."""


def train(config: RlConfig, console: Console | None = None) -> RunState:
    """A whole run, or the rest of one. Returns its last state.

    Raises ConfigError for what cannot work, TooManyFailuresError if the environment fails too often, and the SDK's
    errors for requests that fail.
    """
    with locked(Path(config.output.directory)):
        return _train(config, console or Console())


def _train(config: RlConfig, console: Console) -> RunState:
    find(config.env.name)  # a name that is wrong is told before anything is begun
    state = starting_state(config, console)
    directory = Path(config.output.directory)
    if state.step >= config.training.steps:
        done = f"the run in {directory} has done its {state.step} steps; raise training: steps to go on"
        console.print(Text(done), soft_wrap=True)
        return state
    with ExitStack() as opened:
        workers = make_workers(config.env.workers, config.env.worker_count, config.env.timeout_s)
        opened.callback(workers.shutdown)
        trackers = make_trackers(config.output.trackers, directory, to_tree(config), console)
        for tracker in trackers:
            opened.callback(tracker.close)
        run = _prepared_run(config, opened, workers, state, trackers, console)
        record_settings(config)
        return asyncio.run(run.steps())


def _prepared_run(
    config: RlConfig,
    opened: ExitStack,
    workers: Workers,
    state: RunState,
    trackers: Sequence[Tracker],
    console: Console,
) -> "TrainingLoop":
    """Everything that a run needs to continue from `state`."""
    service = opened.enter_context(connect(config.server))
    client = open_training_client(service, config.model, state.weights)
    template = chat_template(config.model, tokenizer_of(config.model.tokenizer, client))
    base_model = config.model.base_model or base_model_of(client)
    max_context = config.generation.max_context or context_limit(config.server, base_model)
    prompts = prompts_of(config.prompts.file, config.prompts.seed, config.prompts.count, 1000)
    rollouts = make_rollouts(
        config, config.env.options, rollout_settings(config, max_context, template), template, workers
    )
    if config.warmup.steps and not isinstance(rollouts, EnvRollouts):
        raise ConfigError("warmup: steps: environments of kind cookbook have no demonstrations; set steps=0")
    evaluator = Evaluator(config, template, workers, max_context) if config.evaluation.every else None
    directory = Path(config.output.directory)
    checkpoints = RunCheckpoints(client, rest_client(config.server), directory, config.output.keep, state)
    state = replace(state, tokenizer=str(template.tokenizer.name_or_path), home=home_of(directory))
    learner = Learner(client, config.training, _reference(config, service, base_model))
    failures = FailureCounter(config.env.name, config.env.max_failed_share, config.env.max_failed_groups)
    output = RunOutput(config, template, trackers, console, state.step)
    return TrainingLoop(
        config, opened, base_model, rollouts, prompts, learner, evaluator, checkpoints, failures, output, state
    )


def _rewards_differ(group: Group) -> bool:
    return has_variance([trajectory.reward for trajectory in group.usable])


def _reference(config: RlConfig, service: tinker.ServiceClient, base_model: str) -> tinker.SamplingClient | None:
    training = config.training
    return open_policy(service, training.kl_reference, base_model).client if training.kl_coefficient else None


class RunOutput:
    """What a run shows and writes: lines on the console, metrics in trackers, trajectories in files."""

    def __init__(
        self, config: RlConfig, template: ChatTemplate, trackers: Sequence[Tracker], console: Console, step: int
    ) -> None:
        self.config, self.template, self.trackers, self.console = config, template, trackers, console
        self.step = step
        """Number of steps before the one that the run is at."""
        self.status = console.status("")  # nothing, unless the console is a terminal
        self.seconds = defaultdict[str, float](float)
        """Seconds of the current step, by stage."""
        self._shown_at = time.monotonic()
        section = config.output
        self.files = (
            EpisodeFiles(Path(section.directory) / DIRECTORY, section.trajectories_mib * 2**20, template)
            if section.trajectories_every
            else None
        )

    def say(self, text: str) -> None:
        """Print a line, in which nothing is markup."""
        self.console.print(Text(text), soft_wrap=True)

    def show(self, what: str) -> None:
        """Show what the run is doing: in a terminal at once, in a log file once a minute."""
        text = f"step {self.step + 1} of {self.config.training.steps}: {what}"
        self.status.update(Text(text))
        if (
            not self.console.is_terminal
            and "console" in self.config.output.trackers
            and time.monotonic() - self._shown_at >= SHOWN_EVERY_S
        ):
            self.say(text)
            self._shown_at = time.monotonic()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Show the stage, and add the time of the body to its seconds."""
        self.show(stage)
        start = time.monotonic()
        yield
        self.seconds[stage] += time.monotonic() - start

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._shown_at = time.monotonic()
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def write_trajectories(
        self, kind: Literal["step", "evaluation"], step: int, trajectories: Sequence[Trajectory], lessons: Lessons
    ) -> None:
        """Write the episodes of a step or an evaluation, unless the configuration says never."""
        if self.files is not None:
            self.files.write(f"{kind}-{step:06d}", trajectories, lessons, kind=kind, step=step)


@dataclass
class TrainingLoop:
    """The loop of a run, and everything that it works with."""

    config: RlConfig
    opened: ExitStack
    """Closes what was opened on the server when the run ends."""
    base_model: str
    rollouts: Rollouts
    prompts: Sequence[Prompt]
    learner: Learner
    evaluator: Evaluator | None
    checkpoints: RunCheckpoints
    failures: FailureCounter
    output: RunOutput
    state: RunState

    def __post_init__(self) -> None:
        self._warm = self._begun = self.state.step > 0
        """Whether the model was warmed up, and evaluated before the first step."""
        self._sound = False
        """Whether the model on the server is that of `state`, and everything before it is logged."""
        self._lost_at = (-1, 0)
        """The step at which the server last lost something, and how often it did there."""
        self._saved_at = time.monotonic()
        self._played = 0
        """Groups that were finished since the last batch was taken."""
        self._watch = BatchWatch(self.config)
        self._recent: deque[float] = deque(maxlen=10)
        """Seconds of the last steps."""

    async def steps(self) -> RunState:
        """Do all remaining steps. A run that begins is warmed up first. One whose server was started again goes on."""
        self._say_what_begins()
        with self.output.status:
            while True:
                try:
                    policy = await self._publish()
                    self._sound = True
                    return await self._steps(policy)
                except (WeightsLostError, tinker.TinkerError, ValueError) as error:
                    if not await self._is_loss(error):
                        raise
                if not self._sound:
                    await asyncio.to_thread(self._reload)
                self._sound = False

    async def _steps(self, policy: Policy) -> RunState:
        if not self._begun:
            if self.config.warmup.steps and not self._warm:
                policy = await self._warm_up()
            if self.evaluator is not None:
                self.output.log(0, await self._evaluated(policy, 0))
            self._begun = True
        async with task_group() as tasks:
            with closing(self._stream(tasks)) as stream:
                stream.publish(self.state.step, policy)
                for step in range(self.state.step, self.config.training.steps):
                    await self._step(step, stream)
        return self.state

    async def _warm_up(self) -> Policy:
        assert isinstance(self.rollouts, EnvRollouts)
        self._sound = False
        with self.output.timed("warm-up"):
            losses = await warm_up(self.learner.client, self.rollouts, self.config.warmup, self.failures)
        if losses:
            self.output.say(f"warm-up: loss per token {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
        policy = await self._publish()
        self._sound = self._warm = True
        return policy

    async def _is_loss(self, error: Exception) -> bool:
        """Whether the server has lost weights or the model, as after a restart.

        False after MOST_LOSSES times at one step: the run ends then.
        """
        step, times = self._lost_at
        self._lost_at = (self.state.step, times + 1 if step == self.state.step else 1)
        if self._lost_at[1] > MOST_LOSSES or not (lost_something(error) or await self._is_model_lost(error)):
            return False
        log.warning("step %d: the server has lost weights or the model: %s", self.state.step + 1, error)
        return True

    async def _is_model_lost(self, error: Exception) -> bool:
        if not isinstance(error, tinker.RequestFailedError):
            return False
        try:
            await self._publish()
        except tinker.TinkerError:
            return True
        return False

    def _reload(self) -> None:
        """Go on from the last state with a new model. Without a checkpoint the run begins anew."""
        state, config = self.checkpoints.recorded, self.config
        service = self.opened.enter_context(connect(config.server))
        client = open_training_client(service, config.model, state.weights)
        self.learner = Learner(client, config.training, _reference(config, service, self.base_model))
        self.checkpoints.client, self.checkpoints.rest = client, rest_client(config.server)
        self.state = replace(state, tokenizer=self.state.tokenizer, home=self.state.home)
        self.output.step = state.step
        self._warm = self._begun = state.step > 0
        log.warning(
            "the run goes on from step %d with its last checkpoint, %s",
            state.step,
            state.weights or "of which there is none",
        )

    def _stream(self, tasks: asyncio.TaskGroup) -> GroupStream:
        training = self.config.training
        return GroupStream(
            tasks,
            play=self._play,
            batch=training.groups,
            staleness=self.config.staleness,
            in_order=training.mode != "async",
            accepts=_rewards_differ if training.dynamic_sampling else lambda _: True,
            max_draws=training.dynamic_sampling_limit * training.groups,
            next_number=self.state.next_group,
        )

    async def _step(self, step: int, stream: GroupStream) -> None:
        self.output.step = step
        self.output.seconds.clear()
        start = time.monotonic()
        with self.output.timed("wait"):
            groups = await stream.take()
        self._played = 0
        self.failures.judge(min_episodes=1 if step + 1 == self.config.training.steps else MIN_EPISODES)
        metrics = batch_metrics(groups, step, stream.replaced)
        stream.replaced.clear()
        self._watch.look(groups)
        if self.evaluator is None:
            await self._keep_if_best(metrics)  # before learning: the reward was earned by the weights before this step
        self._sound = False
        with self.output.timed("learn"):
            learnt, lessons = await self.learner.learn(groups, step)
        metrics |= learnt
        policy = await self._publish()
        self.state = replace(
            self.state, step=step + 1, next_group=max(self.state.next_group, *(group.number + 1 for group in groups))
        )
        if step + 1 < self.config.training.steps:
            stream.publish(step + 1, policy)
        if self.evaluator is not None and self._is_due(self.config.evaluation.every):
            metrics |= await self._evaluated(policy, step + 1)
        if self._is_due(self.config.output.trajectories_every):
            everyone = [trajectory for group in groups for trajectory in group.trajectories]
            with self.output.timed("write"):
                self.output.write_trajectories("step", step + 1, everyone, by_place(everyone, lessons))
        section = self.config.output
        saves = self._is_due(section.save_every, True) or 0 < section.save_after_s <= time.monotonic() - self._saved_at
        if saves:
            with self.output.timed("save"):
                self.state = await self.checkpoints.save_step(self.state)
        self._recent.append(time.monotonic() - start)
        self.output.seconds["step"] = self._recent[-1]
        self.output.seconds["left"] = (
            sum(self._recent) / len(self._recent) * (self.config.training.steps - self.state.step)
        )
        self.output.log(step + 1, metrics | {f"seconds/{stage}": spent for stage, spent in self.output.seconds.items()})
        if saves:  # after logging, so that a run that continues from here has the metrics of every step before
            await self.checkpoints.record(self.state)
            self._saved_at = time.monotonic()
        self._sound = True

    def _is_due(self, every: int, at_the_end: bool = False) -> bool:
        """Whether something that happens every `every` steps, and after the last one, is due.

        With 0 it happens at most `at_the_end`.
        """
        done = self.state.step
        if done == self.config.training.steps:
            return bool(every) or at_the_end
        return every > 0 and done % every == 0

    async def _play(self, number: int, version: int, policy: Policy) -> Group:
        prompt = prompt_of_group(self.prompts, number, self.config.training.seed)
        members = range(self.config.training.group_size)
        episodes = [EpisodeId(self.rollouts.env, prompt.seed, number, member, version) for member in members]
        trajectories = await self.rollouts.play_group(policy, prompt, episodes)
        self.failures.count(trajectories)
        self._played += 1
        self.output.show(f"{self._played} of {self.config.training.groups} groups played")
        return Group(number, prompt, version, trajectories)

    async def _publish(self) -> Policy:
        with self.output.timed("publish"):
            recorded = self.config.training.loss == "stable_reinforce"
            return TinkerPolicy(
                await self.learner.client.save_weights_and_get_sampling_client(record_stability_info=recorded)
            )

    async def _evaluated(self, policy: Policy, version: int) -> Metrics:
        assert self.evaluator is not None
        with self.output.timed("evaluate"):
            evaluation = await self.evaluator.evaluate(policy, version)
        self.output.write_trajectories("evaluation", version, evaluation.trajectories, {})
        await self._keep_if_best(evaluation.metrics)
        return {f"eval/{name}": value for name, value in evaluation.metrics.items()}

    async def _keep_if_best(self, metrics: Metrics) -> None:
        """Save the weights after `state.step` steps if their reward is the best so far.

        There is no reward if every episode failed.
        """
        best, has_reward = self.state.best_reward, metrics["dropped"] < metrics["trajectories"]
        if self.config.output.save_best and has_reward and (best is None or metrics["reward"] > best):
            self.state = await self.checkpoints.save_best(self.state, metrics["reward"])

    def _say_what_begins(self) -> None:
        training, directory = self.config.training, Path(self.config.output.directory)
        evaluated = f", {len(self.evaluator.prompts)} others evaluated" if self.evaluator is not None else ""
        self.output.say(
            f"{self.config.env.name}: steps {self.state.step + 1} to {training.steps}, with {training.groups} x "
            f"{training.group_size} episodes in each; {len(self.prompts)} prompts{evaluated}; "
            f"metrics in {directory / METRICS}, trajectories and state beside it; "
            f"checkpoints at tinker://{self.learner.client.model_id}/"
        )
