"""The configuration of a run or an evaluation: every setting with its unit, default and limits.

A YAML file has the same sections and keys; an unknown key is refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinsmith_rl.errors import ConfigError
from tinsmith_rl.settings import fill, read_yaml, setting

# Declared here and not beside the functions that use them, so that a configuration is checked before any slow import.
AdvantageKind = Literal["grpo", "rloo", "reinforce_pp", "batch"]
LossScale = Literal["tokens", "sequences", "sum"]
PolicyLoss = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]
ScheduleMode = Literal["sync", "one_step_off", "async"]
WorkerKind = Literal["inline", "thread", "process"]


@dataclass
class ServerSection:
    """The Tinker server."""

    url: str = setting("", "URL, such as http://127.0.0.1:8000; if empty, TINKER_BASE_URL")
    api_key: str = setting("", "API key; if empty, TINKER_API_KEY")
    wait_s: float = setting(60.0, "How long to wait for a server that does not answer or is not ready", "seconds", 0)


@dataclass
class ModelSection:
    """The model to train, and its chat template."""

    base_model: str = setting("", "Name of the base model on the server")
    start_from: str = setting("", "Checkpoint to start from (tinker://.../weights/NAME) instead of a new adapter")
    rank: int = setting(32, "LoRA rank; 0 trains all parameters, if the server can", "", 0)
    seed: int = setting(0, "Seed of the new adapter's weights")
    tokenizer: str = setting("", "Directory or Hub id of the tokenizer; if empty, the one that the server names")
    chat_template: str = setting("", "File with a Jinja chat template, instead of the tokenizer's own")
    template_options: dict[str, Any] = setting({}, "Variables for the chat template, such as enable_thinking")


@dataclass
class PromptsSection:
    """The environment of the episodes."""

    count: int = setting(
        0,
        (
            "Number of prompts: the first rows of `file`, or seeds from `seed` on; 0 is all rows, or 1,000 seeds. "
            "Each pass has another order"
        ),
        "prompts",
        0,
    )
    seed: int = setting(0, "Seed of the first prompt")
    file: str = setting(
        "", "JSONL file with rows of 'messages' and 'fields', for environments that take their episodes from a data set"
    )


@dataclass
class EnvSection:
    """The environment, and where it runs."""

    name: str = setting(
        "",
        (
            "Registered name, or an import path: my_package.envs:MyEnv, or my_env.py:MyEnv, which `import: "
            "my_env.py, name: MyEnv` means too"
        ),
    )
    options: dict[str, Any] = setting({}, "Arguments of the environment")
    kind: Literal["env", "cookbook"] = setting(
        "env", "What the name stands for: an environment, or an EnvGroupBuilder of the Tinker cookbook"
    )
    workers: WorkerKind = setting(
        "inline", "Where environments run: inline if they are fast, thread if they wait, process if they compute"
    )
    worker_count: int = setting(32, "Number of threads or processes that run environments", "workers", 1)
    timeout_s: float = setting(
        60.0, "Time-out of a call that is async, or made in a thread or process", "seconds", 0.01
    )
    max_failed_share: float = setting(
        0.5, "The run ends if the environment fails in more than this share of the episodes", "", 0, 1
    )
    max_failed_groups: int = setting(
        8, "The run ends after this many groups in a row in which every episode failed", "groups", 1
    )


@dataclass
class GenerationSection:
    """The sampling of episodes."""

    max_tokens: int = setting(256, "Maximum length of one answer", "tokens", 1)
    max_turns: int = setting(32, "Maximum number of turns in an episode", "turns", 1)
    context_turns: int = setting(
        0, "How many turns the model sees, besides system messages; 1 is the last message only, 0 is all", "turns", 0
    )
    max_context: int = setting(
        0, "Maximum length of a conversation; 0 is the server's limit for the model", "tokens", 0
    )
    temperature: float = setting(1.0, "Sampling temperature", "", 0)
    top_p: float = setting(1.0, "Nucleus sampling", "", 0, 1)
    top_k: int = setting(-1, "Sample from this many most likely tokens; -1 is all", "tokens", -1)
    stop: list[str] = setting([], "Texts that end an answer, in addition to the model's end of turn")
    end_turn_after_stop_string: bool = setting(
        True, "Put the end-of-turn token, with loss mask 0, behind an answer that ended on a stop text"
    )
    in_flight: int = setting(4096, "Maximum number of episodes at a time", "episodes", 1)


@dataclass
class TrainingSection:
    """The training steps."""

    steps: int = setting(100, "Steps of the whole run", "steps", 1)
    groups: int = setting(16, "Groups in a batch", "groups", 1)
    group_size: int = setting(8, "Episodes of one prompt", "episodes", 1)
    seed: int = setting(0, "Seed of sampling and of the order of prompts")
    advantages: AdvantageKind = setting("grpo", "How rewards become advantages; docs/rl.md has the formulas")
    loss: PolicyLoss = setting("importance_sampling", "Name of the loss on the server")
    loss_options: dict[str, Any] = setting({}, "Options of the loss, such as clip_low_threshold")
    loss_scale: LossScale = setting(
        "tokens", "Mean over all sampled tokens, mean over samples of the mean over their tokens, or sum"
    )
    substeps: int = setting(1, "Optimizer steps in one pass over a batch, each on its part of the samples", "steps", 1)
    epochs: int = setting(
        1, "Passes over a batch; with more than one, take a loss that clips, such as ppo", "passes", 1
    )
    learning_rate: float = setting(1e-4, "Learning rate of AdamW, after its warm-up", "", 0)
    decay: Literal["constant", "linear"] = setting("constant", "How the learning rate changes over the run")
    warmup_steps: int = setting(0, "Steps in which the learning rate rises from zero", "steps", 0)
    weight_decay: float = setting(0.0, "Weight decay of AdamW", "", 0)
    grad_clip_norm: float = setting(1.0, "Maximum norm of the gradient; 0 does not clip", "", 0)
    kl_coefficient: float = setting(0.0, "Weight of the KL penalty against the reference", "", 0)
    kl_reference: str = setting(
        "", "Reference of the KL penalty, a checkpoint (tinker://...); if empty, the base model"
    )
    tis_cap: float = setting(
        0.0, "Cap of the truncated importance sampling between sampler and trainer, per token; 0 turns it off", "", 0
    )
    overlong_filtering: bool = setting(False, "Learn nothing from episodes that were cut because they were too long")
    dynamic_sampling: bool = setting(False, "Discard groups in which all rewards are equal, and play others")
    dynamic_sampling_limit: int = setting(4, "Most groups that are played to fill a batch, in batches", "batches", 1)
    mode: ScheduleMode = setting("sync", "When groups are played: sync, one_step_off or async")
    max_staleness: int = setting(2, "How many steps old the weights of a group may be in mode async", "steps", 1)


@dataclass
class WarmupSection:
    """Supervised steps on demonstrations before the first step, for environments that can demonstrate."""

    steps: int = setting(0, "Supervised steps", "steps", 0)
    episodes: int = setting(32, "Demonstrated episodes in a step", "episodes", 1)
    learning_rate: float = setting(1e-3, "Learning rate of AdamW; falls to zero over these steps", "", 0)
    seed: int = setting(1_000_000, "Seed of the first demonstrated prompt")
    thought: str = setting("", "Text before every demonstrated answer, such as reasoning and </think>")


@dataclass
class EvaluationSection:
    """Rollouts and metrics on prompts that are not trained on."""

    every: int = setting(0, "Evaluate every this many steps, and at the start and the end; 0 never", "steps", 0)
    prompts: int = setting(0, "Number of prompts; 0 is all rows of `file`, or 64 seeds", "prompts", 0)
    samples: int = setting(1, "Episodes of each prompt", "episodes", 1)
    seed: int = setting(2_000_000, "Seed of the first prompt")
    file: str = setting("", "JSONL file of prompts, instead of seeds")
    options: dict[str, Any] = setting({}, "Arguments of the environment, where they differ from training")
    temperature: float = setting(1.0, "Sampling temperature", "", 0)
    success: float = setting(1.0, "Reward from which on an episode is a success, for pass@k", "")
    pass_at: list[int] = setting([], "Each k for which to report pass@k, at most `samples`")
    model: str = setting(
        "", "What --eval evaluates: a checkpoint (tinker://...), the directory of a run, or the base model if empty"
    )


@dataclass
class OutputSection:
    """The files of a run, and where they are written."""

    directory: str = setting(
        "",
        (
            "Directory for metrics, trajectories and the state of the run; "
            "if empty, rl-output/NAME for a configuration in NAME.yaml"
        ),
    )
    resume: bool = setting(
        True, "Continue the run in the directory from its last checkpoint; false refuses a directory that holds a run"
    )
    allow_changes: list[str] = setting(
        [], "Settings, as SECTION.KEY, that may differ from those that the run in the directory began with"
    )
    save_every: int = setting(
        10,
        (
            "Save a checkpoint every this many steps, and at the end; a killed run continues from the last; "
            "0 at the end only"
        ),
        "steps",
        0,
    )
    save_after_s: float = setting(
        300.0,
        "Save a checkpoint also after the first step that ends this long after the last one was saved; 0 never",
        "seconds",
        0,
    )
    keep: int = setting(
        3, "How many of these checkpoints stay on the server, besides the best weights; 0 keeps all", "checkpoints", 0
    )
    save_best: bool = setting(True, "Keep the weights with the best reward so far, of evaluations if there are any")
    trajectories_every: int = setting(1, "Write the episodes of every this many steps to a file; 0 never", "steps", 0)
    trajectories_mib: int = setting(
        1024, "Size of all these files with their images, beyond which the oldest are deleted; 0 keeps all", "MiB", 0
    )
    trackers: list[str] = setting(["console"], "console, tensorboard, wandb, trackio")


@dataclass
class RlConfig:
    """The whole configuration."""

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
        """Most steps by which the weights of a group may be old."""
        return {"sync": 0, "one_step_off": 1, "async": self.training.max_staleness}[self.training.mode]


def load(file: Path) -> RlConfig:
    """The configuration in a YAML file.

    Raises ConfigError: the file cannot be read, has an unknown key, or an impossible value.
    """
    return from_tree(read_yaml(file), str(file), file.stem)


def begin_another(config: RlConfig) -> None:
    """Name an output directory that does not exist: NAME-2, NAME-3, ... beside the one that the configuration names."""
    name, number = config.output.directory, 1
    while Path(config.output.directory).exists():
        number += 1
        config.output.directory = f"{name}-{number}"


def from_tree(tree: Mapping[str, Any], source: str = "configuration", name: str = "run") -> RlConfig:
    """The configuration in plain dictionaries; `source` names it in errors, `name` its output.

    Raises ConfigError as `load` does.
    """
    config = RlConfig()
    env = tree.get("env")
    # A word that Python keeps for itself, so no field can have this name
    if isinstance(env, Mapping) and "import" in env:
        file, name = env["import"], env.get("name") or ""
        if not isinstance(file, str) or not file.endswith(".py") or not name:
            raise ConfigError(
                f"{source}: env: import={file!r}, name={name!r} must be a Python file, such as my_env.py, "
                "and a name in it"
            )
        tree = {
            **tree,
            "env": {**{key: value for key, value in env.items() if key != "import"}, "name": f"{file}:{name}"},
        }
    fill(config, tree, source)
    config.output.directory = config.output.directory or f"rl-output/{name}"
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
        raise ConfigError(
            f"{source}: training: group_size=1 leaves {config.training.advantages} nothing to compare with; "
            "take 2 or more"
        )
    if config.training.substeps > config.training.groups:
        raise ConfigError(
            f"{source}: training: substeps={config.training.substeps} exceeds groups={config.training.groups}"
        )
    _check_loss(config, source)
    too_many = [k for k in config.evaluation.pass_at if not 1 <= k <= config.evaluation.samples]
    if too_many:
        raise ConfigError(
            f"{source}: evaluation: pass_at={too_many} must lie between 1 and samples={config.evaluation.samples}"
        )


def _check_loss(config: RlConfig, source: str) -> None:
    training, temperature = config.training, config.generation.temperature
    if training.loss == "dro" and training.loss_scale != "sum":
        raise ConfigError(
            f"{source}: training: loss_scale={training.loss_scale} would divide dro's advantages, but not its penalty, "
            "which the server adds; take sum"
        )
    if training.loss == "stable_reinforce" and temperature != 1:
        raise ConfigError(
            f"{source}: generation: temperature={temperature}: stable_reinforce compares with recorded "
            "log-probabilities, so these must be at temperature 1; take 1"
        )
    if training.loss == "stable_reinforce" and config.env.kind == "cookbook":
        raise ConfigError(
            f"{source}: training: loss=stable_reinforce needs to know how each token was sampled, "
            "which kind=cookbook does not say"
        )
    if temperature != 1 and training.kl_coefficient:
        raise ConfigError(
            f"{source}: generation: temperature={temperature}: the KL penalty compares with log-probabilities at "
            "temperature 1; take 1"
        )
    if temperature != 1 and training.loss != "importance_sampling" and not training.tis_cap:
        raise ConfigError(
            f"{source}: generation: temperature={temperature}: {training.loss} would clip the ratio of the trainer's "
            "log-probabilities, which are at temperature 1, to those at this one; take 1, or set tis_cap"
        )
