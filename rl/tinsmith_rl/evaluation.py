"""Evaluation: rollouts and metrics without training, with the same environments and rollouts as training."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith_rl.calls import FailureCounter
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.config import EvaluationSection, RlConfig
from tinsmith_rl.configured_rollouts import make_rollouts, rollout_settings
from tinsmith_rl.env import Prompt
from tinsmith_rl.episode_files import DIRECTORY, EpisodeFiles
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.metrics import Metrics, pass_at_k, succeeded, trajectory_metrics
from tinsmith_rl.policy import Policy, chat_template, connect, context_limit, open_policy, tokenizer_of
from tinsmith_rl.prompts import prompts_of
from tinsmith_rl.resume import load_state
from tinsmith_rl.rollouts import task_group
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import Workers, make_workers


@dataclass(frozen=True)
class Evaluation:
    """Metrics and episodes of an evaluation."""

    metrics: Metrics
    trajectories: list[Trajectory]
    """In the order of their prompts."""


class Evaluator:
    """Evaluates policies, always on the same prompts with the same seeds."""

    def __init__(self, config: RlConfig, template: ChatTemplate, workers: Workers, max_context: int) -> None:
        self.section: EvaluationSection = config.evaluation
        self.prompts = prompts_of(self.section.file, self.section.seed, self.section.prompts, 64)
        settings = rollout_settings(config, max_context, template)
        request = replace(settings.request, temperature=self.section.temperature)
        settings = replace(settings, seed=self.section.seed, request=request)
        self.failures = FailureCounter(config.env.name, config.env.max_failed_share, config.env.max_failed_groups)
        self.rollouts = make_rollouts(
            config, {**config.env.options, **self.section.options}, settings, template, workers
        )

    async def evaluate(self, policy: Policy, version: int = 0) -> Evaluation:
        """Play each prompt `samples` times. Raises TooManyFailuresError if the environment fails too often."""
        async with task_group() as tasks:
            playing = [
                tasks.create_task(self._group(policy, number, prompt, version))
                for number, prompt in enumerate(self.prompts)
            ]
        groups = tuple(task.result() for task in playing)
        for group in groups:
            self.failures.count(group)
        self.failures.judge(min_episodes=1)
        return Evaluation(trajectory_metrics(groups) | self._pass_at(groups), list(chain(*groups)))

    async def _group(self, policy: Policy, number: int, prompt: Prompt, version: int) -> tuple[Trajectory, ...]:
        episodes = [
            EpisodeId(self.rollouts.env, prompt.seed, number, member, version) for member in range(self.section.samples)
        ]
        return await self.rollouts.play_group(policy, prompt, episodes)

    def _pass_at(self, groups: Sequence[Sequence[Trajectory]]) -> Metrics:
        successes = [[succeeded(trajectory.reward, self.section.success) for trajectory in group] for group in groups]
        return {f"pass@{k}": pass_at_k(successes, k) for k in self.section.pass_at}


def run_evaluation(config: RlConfig, console: Console) -> Evaluation:
    """Evaluate the model that the configuration names, print a table, write evaluation.json and the episodes.

    Raises ConfigError for what cannot work, such as a directory that holds no run; TooManyFailuresError.
    """
    path, tokenizer = _evaluated_model(config)
    with connect(config.server) as service:
        policy = open_policy(service, path, config.model.base_model)
        template = chat_template(config.model, tokenizer_of(tokenizer, policy.client))
        workers = make_workers(config.env.workers, config.env.worker_count, config.env.timeout_s)
        max_context = config.generation.max_context or context_limit(config.server, config.model.base_model)
        evaluation = asyncio.run(Evaluator(config, template, workers, max_context).evaluate(policy))
        workers.shutdown()
    directory = Path(config.output.directory)
    directory.mkdir(parents=True, exist_ok=True)
    report = {"model": path or config.model.base_model, "env": config.env.name, **evaluation.metrics}
    (directory / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    files = EpisodeFiles(directory / DIRECTORY, config.output.trajectories_mib * 2**20, template)
    files.write("evaluation", evaluation.trajectories, kind="evaluation", step=None, model=report["model"])
    print_metrics(str(report["model"]), evaluation.metrics, console)
    return evaluation


def print_metrics(title: str, metrics: Metrics, console: Console) -> None:
    """Print a table of metrics.

    The names are plain text: in markup, Rich would replace `:train:` in a path by an emoji.
    """
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(Text(name), f"{value:.4g}")
    console.print(Text(title), soft_wrap=True)
    console.print(table)


def _evaluated_model(config: RlConfig) -> tuple[str, str]:
    """(path of the weights, empty for the base model; tokenizer, empty for the base model's). Raises ConfigError."""
    model = config.evaluation.model
    if not model or model.startswith("tinker://"):
        return model, config.model.tokenizer
    state = load_state(Path(model))
    if state is None:
        raise ConfigError(
            f"evaluation: model={model!r} is no tinker:// path, and no directory of a run (there "
            "is no state.json in it)"
        )
    return state.best_weights or state.sampler_weights, config.model.tokenizer or state.tokenizer
