"""One tree of dataclasses for `tinsmith rl` and `tinsmith eval`: every setting once, with its unit, default and limits.

A YAML file holds the same tree by section; an unknown key is refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinsmith.config_values import fill, knob, read_yaml
from tinsmith.errors import ConfigError

# Here, and not beside the functions that take them, so that a configuration is checked before anything slow is imported.
AdvantageKind = Literal["grpo", "rloo", "reinforce_pp", "batch"]
LossScale = Literal["tokens", "sequences", "sum"]
PolicyLoss = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"]
ScheduleMode = Literal["sync", "one_step_off", "async"]
WorkerKind = Literal["inline", "thread", "process"]


@dataclass
class ServerSection:
    """Which Tinker server."""

    url: str = knob("", "URL, such as http://127.0.0.1:8000; empty takes TINKER_BASE_URL")
    api_key: str = knob("", "API key; empty takes TINKER_API_KEY")
    wait_s: float = knob(60.0, "How long to wait for a server that does not answer or is not ready", "seconds", 0)


@dataclass
class ModelSection:
    """What is trained, and how conversations are written for it."""

    base_model: str = knob("", "Name of the base model on the server")
    start_from: str = knob("", "Checkpoint to start from (tinker://.../weights/NAME) instead of a new adapter")
    rank: int = knob(32, "LoRA rank; 0 trains all parameters, where the server can", "", 0)
    seed: int = knob(0, "Seed of the adapter's first weights")
    tokenizer: str = knob("", "Directory or Hub id of the tokenizer; empty takes what the server names")
    chat_template: str = knob("", "File with a Jinja chat template in place of the tokenizer's own")
    template_options: dict[str, Any] = knob({}, "Variables for the chat template, such as enable_thinking")


@dataclass
class PromptsSection:
    """Which episodes are played."""

    count: int = knob(1000, "Prompts: seeds that begin at `seed`, or at most so many rows of `file`; shuffled anew for every pass", "", 1)
    seed: int = knob(0, "Seed of the first prompt")
    file: str = knob("", "JSONL file with rows of 'messages' and 'fields' for environments that take their episodes from a data set")


@dataclass
class EnvSection:
    """The environment, and where it runs."""

    name: str = knob("", "Registered name, or an import path such as my_package.envs:MyEnv")
    options: dict[str, Any] = knob({}, "Arguments of the environment")
    kind: Literal["env", "cookbook"] = knob("env", "What the name makes: an environment, or an EnvGroupBuilder of the Tinker cookbook")
    workers: WorkerKind = knob("inline", "Where environments run: threads for those that wait, processes for what computes")
    worker_count: int = knob(32, "Threads or processes", "", 1)
    timeout_s: float = knob(60.0, "Longest call of an environment in a thread or process", "seconds", 0.01)
    max_failed_share: float = knob(0.5, "Largest share of episodes in which the environment may fail; more end the run", "", 0, 1)
    max_failed_groups: int = knob(8, "So many groups in a row in which every episode failed end the run", "groups", 1)


@dataclass
class GenerationSection:
    """How turns are sampled."""

    max_tokens: int = knob(256, "Longest answer of one turn", "tokens", 1)
    max_turns: int = knob(32, "Most turns of an episode", "turns", 1)
    context_turns: int = knob(0, "Newest turns that the model sees, 1 only what was said last; system messages stay; 0 all", "turns", 0)
    max_context: int = knob(0, "Longest conversation; 0 takes the server's limit for the model", "tokens", 0)
    temperature: float = knob(1.0, "Sampling temperature", "", 0)
    top_p: float = knob(1.0, "Nucleus sampling", "", 0, 1)
    top_k: int = knob(-1, "Most likely tokens to sample from; -1 takes all", "", -1)
    stop: list[str] = knob([], "Texts that end an answer, beside the model's end of turn")
    end_turn_after_stop_string: bool = knob(True, "Put the end-of-turn token behind an answer that ended on a stop text (loss mask 0)")
    in_flight: int = knob(4096, "Most trajectories played at a time", "", 1)


@dataclass
class TrainingSection:
    """What a step does."""

    steps: int = knob(100, "Steps of the whole run", "steps", 1)
    groups: int = knob(16, "Groups in a batch", "groups", 1)
    group_size: int = knob(8, "Episodes of one prompt", "episodes", 1)
    seed: int = knob(0, "Sampling, and the order of prompts, follow from it")
    advantages: AdvantageKind = knob("grpo", "How rewards become advantages")
    loss: PolicyLoss = knob("importance_sampling", "Loss on the server, by its name")
    loss_options: dict[str, Any] = knob({}, "Numbers for the loss, such as clip_low_threshold")
    loss_scale: LossScale = knob("tokens", "Mean over sampled tokens, over samples of their mean, or a plain sum")
    substeps: int = knob(1, "Optimizer steps on one batch, each with its share of the samples", "", 1)
    epochs: int = knob(1, "Passes over a batch; more than one calls for a loss that clips, such as ppo", "", 1)
    learning_rate: float = knob(1e-4, "AdamW's, after its warm-up", "", 0)
    decay: Literal["constant", "linear"] = knob("constant", "Learning rate over the run")
    warmup_steps: int = knob(0, "Steps in which the learning rate rises from zero", "steps", 0)
    weight_decay: float = knob(0.0, "AdamW's", "", 0)
    grad_clip_norm: float = knob(1.0, "Longest gradient; 0 leaves it as it is", "", 0)
    kl_coefficient: float = knob(0.0, "Weight of the KL penalty against the reference", "", 0)
    kl_reference: str = knob("", "Checkpoint (tinker://...) to stay close to; empty is the base model")
    tis_cap: float = knob(0.0, "Cap of the token-level importance correction between sampler and trainer; 0 leaves it out", "", 0)
    overlong_filtering: bool = knob(False, "Learn nothing from trajectories that were cut for being long")
    dynamic_sampling: bool = knob(False, "Replace groups in which all rewards are equal")
    dynamic_sampling_limit: int = knob(4, "Batches that may be drawn to fill one", "batches", 1)
    mode: ScheduleMode = knob("sync", "When groups are played")
    max_staleness: int = knob(2, "Steps that the weights of a group may be behind, in mode async", "steps", 1)


@dataclass
class WarmupSection:
    """Supervised steps on demonstrations before the first step, for environments that can demonstrate."""

    steps: int = knob(0, "Supervised steps", "steps", 0)
    episodes: int = knob(32, "Demonstrated episodes in a step", "episodes", 1)
    learning_rate: float = knob(1e-3, "AdamW's; falls to zero over these steps", "", 0)
    seed: int = knob(1_000_000, "Seed of the first demonstrated prompt")
    thought: str = knob("", "Text before every demonstrated answer, such as a thought and </think>")


@dataclass
class EvaluationSection:
    """Generation and metrics on prompts that are not trained on."""

    every: int = knob(0, "Steps between evaluations, and one at the start and the end; 0 never", "steps", 0)
    prompts: int = knob(64, "Prompts", "", 1)
    samples: int = knob(1, "Episodes of each prompt", "episodes", 1)
    seed: int = knob(2_000_000, "Seed of the first prompt")
    file: str = knob("", "JSONL file of prompts in place of seeds")
    options: dict[str, Any] = knob({}, "Arguments of the environment that differ from training")
    temperature: float = knob(1.0, "Sampling temperature", "", 0)
    success: float = knob(1.0, "Reward from which an episode counts as a success, for pass@k", "")
    pass_at: list[int] = knob([], "Which k of pass@k to report, each at most `samples`")
    model: str = knob("", "What `tinsmith eval` samples: a checkpoint (tinker://...), the directory of a run, or empty for the base model")


@dataclass
class OutputSection:
    """What is written where."""

    directory: str = knob("rl-output", "Metrics, trajectories, pages and the state to resume from")
    resume: bool = knob(True, "Go on from the last checkpoint of the run in the directory; false refuses a directory that holds a run")
    allow_changes: list[str] = knob([], "Settings that the run in the directory may go on with in place of its own: SECTION.KEY")
    save_every: int = knob(
        10, "Steps between checkpoints, and one at the end; a killed run goes on from the last; 0 saves at the end only", "steps", 0
    )
    keep: int = knob(3, "Newest of these checkpoints that stay on the server, and the best weights alone; 0 keeps all", "checkpoints", 0)
    save_best: bool = knob(True, "Keep the weights with the best reward so far (of evaluations, if there are any)")
    trajectories_every: int = knob(10, "Steps between batches written as JSONL and as an HTML page; 0 never", "steps", 0)
    page_trajectories: int = knob(32, "Most trajectories on one page", "", 1)
    trackers: list[str] = knob(["console"], "console, tensorboard, wandb, trackio")


@dataclass
class RlConfig:
    """A whole run."""

    server: ServerSection = field(default_factory=ServerSection)
    model: ModelSection = field(default_factory=ModelSection)
    prompts: PromptsSection = field(default_factory=PromptsSection)
    env: EnvSection = field(default_factory=EnvSection)
    generation: GenerationSection = field(default_factory=GenerationSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    output: OutputSection = field(default_factory=OutputSection)

    @property
    def staleness(self) -> int:
        """Steps that the weights of a group may be behind."""
        return {"sync": 0, "one_step_off": 1, "async": self.training.max_staleness}[self.training.mode]


def load(file: Path) -> RlConfig:
    """The configuration in a YAML file. Raises ConfigError: unreadable, unknown key, impossible value."""
    return from_tree(read_yaml(file), str(file))


def from_tree(tree: Mapping[str, Any], source: str = "configuration") -> RlConfig:
    """The configuration in plain dictionaries. Raises ConfigError as `load` does."""
    config = RlConfig()
    fill(config, tree, source)
    _check(config, source)
    return config


def to_tree(config: RlConfig) -> dict[str, Any]:
    """The configuration as plain dictionaries, without the API key."""
    tree = dataclasses.asdict(config)
    del tree["server"]["api_key"]
    return tree


def _check(config: RlConfig, source: str) -> None:
    if not config.env.name:
        raise ConfigError(f"{source}: env: name is missing: which environment?")
    if not config.model.base_model and not config.model.start_from:
        raise ConfigError(f"{source}: model: base_model is missing: which model of the server?")
    if config.training.advantages != "batch" and config.training.group_size < 2:
        raise ConfigError(f"{source}: training: group_size=1 leaves {config.training.advantages} nothing to compare with; take 2 or more")
    if config.training.substeps > config.training.groups:
        raise ConfigError(f"{source}: training: substeps={config.training.substeps} exceeds groups={config.training.groups}")
    _check_loss(config, source)
    too_many = [k for k in config.evaluation.pass_at if not 1 <= k <= config.evaluation.samples]
    if too_many:
        raise ConfigError(f"{source}: evaluation: pass_at={too_many} must lie between 1 and samples={config.evaluation.samples}")


def _check_loss(config: RlConfig, source: str) -> None:
    training, temperature = config.training, config.generation.temperature
    if training.loss == "dro" and training.loss_scale != "sum":
        raise ConfigError(
            f"{source}: training: loss_scale={training.loss_scale} would divide what dro gains and leave its penalty as it is; take sum"
        )
    if temperature != 1 and training.kl_coefficient:
        raise ConfigError(
            f"{source}: generation: temperature={temperature}: the KL penalty compares with log-probabilities at temperature 1; take 1"
        )
    if temperature != 1 and training.loss != "importance_sampling" and not training.tis_cap:
        raise ConfigError(
            f"{source}: generation: temperature={temperature}: {training.loss} would clip ratios to log-probabilities at this temperature "
            "by those at 1; take 1, or set tis_cap"
        )
