"""Generation and metrics only, with the environments and the generator of training."""

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import EvaluationSection, RlConfig
from tinsmith.rl.connection import chat_template, connect, context_limit, load_tokenizer, policy_of, tokenizer_of
from tinsmith.rl.env import Prompt
from tinsmith.rl.failures import Failures
from tinsmith.rl.metrics import Metrics, pass_at_k, succeeded, trajectory_metrics
from tinsmith.rl.pages import write_jsonl, write_page
from tinsmith.rl.policy import Policy
from tinsmith.rl.prompts import rows, seeds
from tinsmith.rl.rules import make_player, rules_of
from tinsmith.rl.run_state import load_state
from tinsmith.rl.trajectory import Origin, Trajectory
from tinsmith.rl.workers import Workers, make_workers


@dataclass(frozen=True)
class Evaluation:
    """What came out."""

    metrics: Metrics
    groups: tuple[tuple[Trajectory, ...], ...]
    """Episodes by prompt."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All episodes."""
        return [trajectory for group in self.groups for trajectory in group]


class Evaluator:
    """Evaluates policies on the prompts of a configuration, always the same ones with the same seeds."""

    def __init__(self, config: RlConfig, template: ChatTemplate, workers: Workers, max_context: int) -> None:
        self.section: EvaluationSection = config.evaluation
        self.prompts = evaluation_prompts(config.evaluation)
        rules = rules_of(config, max_context, template)
        rules = replace(rules, seed=config.evaluation.seed, request=replace(rules.request, temperature=config.evaluation.temperature))
        self.failures = Failures(config.env.name, config.env.max_failed_share, config.env.max_failed_groups)
        self.player = make_player(config, {**config.env.options, **config.evaluation.options}, rules, template, workers)

    async def evaluate(self, policy: Policy, version: int = 0) -> Evaluation:
        """Every prompt `samples` times. Raises TooManyFailuresError if the environment fails too often."""
        playing = [self._group(policy, number, prompt, version) for number, prompt in enumerate(self.prompts)]
        groups = await asyncio.gather(*playing)
        for group in groups:
            self.failures.count(group)
        self.failures.judge(enough=1)
        metrics = trajectory_metrics(groups)
        successes = [[succeeded(trajectory.reward, self.section.success) for trajectory in group] for group in groups]
        metrics |= {f"pass@{k}": pass_at_k(successes, k) for k in self.section.pass_at}
        return Evaluation(metrics, tuple(groups))

    async def _group(self, policy: Policy, number: int, prompt: Prompt, version: int) -> tuple[Trajectory, ...]:
        origins = [Origin(self.player.env, prompt.seed, number, member, version) for member in range(self.section.samples)]
        return await self.player.play_group(policy, prompt, origins)


def evaluation_prompts(section: EvaluationSection) -> list[Prompt]:
    """The prompts: rows of the file, or seeds."""
    return rows(Path(section.file), section.prompts) if section.file else seeds(section.seed, section.prompts)


def run_evaluation(config: RlConfig, console: Console) -> Evaluation:
    """`tinsmith eval`: sample the model that the configuration names, print a table, write evaluation.json, .jsonl and .html.

    Raises ConfigError for a directory that holds no run.
    """
    path, tokenizer = _evaluated(config)
    with connect(config.server) as service:
        policy = policy_of(service, path, config.model.base_model)
        template = chat_template(config.model, load_tokenizer(tokenizer) if tokenizer else tokenizer_of(policy))
        workers = make_workers(config.env.workers, config.env.worker_count, config.env.timeout_s)
        max_context = config.generation.max_context or context_limit(config.server, config.model.base_model)
        evaluation = asyncio.run(Evaluator(config, template, workers, max_context).evaluate(policy))
        workers.shutdown()
    directory = Path(config.output.directory)
    directory.mkdir(parents=True, exist_ok=True)
    report = {"model": path or config.model.base_model, "env": config.env.name, **evaluation.metrics}
    (directory / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_jsonl(directory / "evaluation.jsonl", evaluation.trajectories, template)
    shown = evaluation.trajectories[: config.output.page_trajectories]
    write_page(directory / "evaluation.html", shown, template, f"{config.env.name}: {report['model']}")
    print_metrics(str(report["model"]), evaluation.metrics, console)
    return evaluation


def print_metrics(title: str, metrics: Metrics, console: Console) -> None:
    """The metrics, one a line, as plain text: Rich would take `:train:` in a path for an emoji."""
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(Text(name), f"{value:.4g}")
    console.print(Text(title), soft_wrap=True)
    console.print(table)


def _evaluated(config: RlConfig) -> tuple[str, str]:
    """Path of the weights (empty: the base model) and tokenizer."""
    model = config.evaluation.model
    if not model or model.startswith("tinker://"):
        return model, config.model.tokenizer
    state = load_state(Path(model))
    if state is None:
        raise ConfigError(f"evaluation: model={model!r} is no tinker:// path, and no directory of a run (there is no state.json in it)")
    return state.best_weights or state.sampler_weights, config.model.tokenizer or state.tokenizer
