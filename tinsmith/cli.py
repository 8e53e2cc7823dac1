"""The command line: `tinsmith serve` and the other commands.

Every setting of `tinsmith/config.py` becomes an option of `serve` and `doctor`, and some of `plan`, with the help, unit
and default that are declared there. Each command imports what it needs when it runs, and help is printed without Rich,
so that `tinsmith --help` answers at once.
"""

import dataclasses
import importlib.util
import inspect
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from tinsmith import __version__
from tinsmith.config import CONFIG_VARIABLE, base_model_sources, settings
from tinsmith.config_values import Setting, at_home, base_model_source, installer, require_empty
from tinsmith.errors import ConfigError, TinsmithError, printable

app = typer.Typer(
    name="tinsmith",
    help="A self-hosted server for the Tinker API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. An error that a user can mend ends in one line on standard error and exit code 2.

    That includes an error of the operating system about a file, such as one that cannot be read.
    """
    try:
        app()
    except TinsmithError as error:
        # It may quote what a server said
        print("tinsmith:", "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"tinsmith: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _end_in_order() -> None:
    """Let signals to end raise SystemExit, so that what is half written is deleted. `serve` handles them itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _path(given: str | Path) -> Path:
    """The path that is given, or a default. `~/` is read here too: a shell leaves it after `=` and in a variable."""
    return Path(at_home(str(given)))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tinsmith {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A self-hosted server for the Tinker API, for language and vision-language models on your own hardware."""


def serve(config: Path | None, **options: Any) -> None:
    """Serve base models to Tinker clients until Ctrl-C.

    Settings may also stand in the file given with --config, and in environment variables: TINSMITH_PORT for --port. For
    an option that may be repeated, the variable has the plural name and holds several words:
    TINSMITH_BASE_MODELS="tiny=/models/tiny Qwen/Qwen3-4B". The command line overrides the environment, and the
    environment overrides the file.
    """
    from tinsmith.commands.serve import configuration_of, serve

    serve(configuration_of(config, options))


def warm(config: Path | None, **options: Any) -> None:
    """Do what makes the first start slow, such as compiling kernels, and exit.

    Give it the settings of the server: a later `tinsmith serve` with them and the same data directory starts quickly.
    Run it before a server is needed, or while an image of a machine is made.
    """
    from tinsmith.commands.serve import configuration_of, warm

    took = warm(configuration_of(config, options))
    typer.echo(
        f"ready after {took:.0f} s; what was compiled and checked is kept for the next start with these settings"
    )


def doctor(config: Path | None, **options: Any) -> None:
    """Check what this machine offers and what is missing.

    It takes the settings of `serve`. With --base-model it also estimates the memory that the model needs. Exits with
    code 1 if something is missing.
    """
    from tinsmith.commands.serve import configuration_of

    configuration = configuration_of(config, options)
    from tinsmith.models.files import problems

    for name, source in (base_model_sources(configuration) if configuration.base_models else {}).items():
        for problem in problems(source, whole=True):
            typer.echo(f"{name}: {problem}")
    from rich.console import Console

    from tinsmith.commands.doctor import run_doctor  # which takes seconds

    raise typer.Exit(run_doctor(configuration, Console(highlight=False)))


def plan(model: str, rank: int, memory_gib: float | None, as_json: bool, config: Path | None, **options: Any) -> None:
    """Say what LoRA trains in a model, what fits into a device's memory, and how long a sequence trains.

    No weights are read: a directory that holds nothing but config.json is enough. Exits with code 1 if not even one
    adapter fits.
    """
    from tinsmith.commands.serve import configuration_of

    configuration = configuration_of(config, options)
    configuration.base_models = [model]
    if not configuration.training.trains:
        raise ConfigError(
            "train=none leaves nothing to plan: leave it out, or ask `tinsmith doctor` what fits for sampling"
        )
    from tinsmith.models.files import require_usable

    require_usable(base_model_sources(configuration).values(), whole=False)
    from tinsmith.commands.plan import print_plan
    from tinsmith.memory.plan import make_plan

    made = make_plan(configuration, rank, memory_gib)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made), indent=2))
    else:
        from rich.console import Console

        print_plan(made, Console(highlight=False))
    raise typer.Exit(0 if made.fits else 1)


def _option(setting: Setting) -> inspect.Parameter:
    names = f"{setting.option}/{setting.refused}" if setting.refused else setting.option
    option = typer.Option(names, help=setting.described, show_default=False, metavar=setting.accepted or None)
    # A number arrives as a text, because it may be a size such as 2GiB, which config_values.py reads. None means that
    # the option was not given: then the environment, the file or the default decides.
    kind = str if setting.type in (int, float) else setting.type
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _parameter(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


class _SettingsCommand(TyperCommand):
    """A command with an option for every setting: its --help shows common ones, --help-all each in its section."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options that are asked for, under the headings of their sections."""
        sections = dict[str, list[tuple[str, str]]]()
        known = {each.name: each for each in settings()}
        for parameter in self.get_params(ctx):
            setting = known.get(parameter.name or "")
            row = parameter.get_help_record(ctx)
            if row is None or (setting and not setting.info.common and not ctx.meta.get(_EVERYTHING)):
                continue
            in_section = setting is not None and len(setting.path) > 1 and ctx.meta.get(_EVERYTHING)
            sections.setdefault(f"Section {setting.path[0]}" if setting and in_section else "Options", []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


_EVERYTHING = "tinsmith.everything"
"""Key of a command's context that says that all settings are asked for."""


def _print_all_help(context: typer.Context, wanted: bool) -> None:
    """Print the help and exit; as the option's value, None is no setting that was given."""
    if wanted:
        context.meta[_EVERYTHING] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    is_eager=True,
    callback=_print_all_help,
    help="Show all settings, by section of the file, and exit. --help shows the common ones",
)
_FILE = typer.Option(
    "--config",
    parser=_path,
    metavar="FILE.yaml",
    envvar=CONFIG_VARIABLE,
    help="Read settings from this file, by section, such as server: {port: 9000}",
)
_PLAN_OPTIONS = [
    _parameter(
        "model",
        Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of the model.")],
        inspect.Parameter.empty,
    ),
    _parameter(
        "rank", Annotated[int, typer.Option(min=0, metavar="NUMBER", help="LoRA rank; 0 trains all parameters.")], 32
    ),
    _parameter(
        "memory_gib",
        Annotated[
            float | None,
            typer.Option(
                min=0,
                metavar="GIB",
                help="Memory of a GPU to plan for.",
                show_default="what is free on this machine's device",
            ),
        ],
    ),
    _parameter("as_json", Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")], False),
]
_PLANNED = (
    *("dtype", "expert_dtype", "memory_share", "max_context", "tokens_per_pass", "logits_chunk", "planned_models"),
    *("paged_state_share", "full_state", "sampler", "kv_cache_gib", "snapshot_gib", "max_running", "workers", "shard"),
)
"""Settings of a server that matter for a plan."""


def _signature(own: list[inspect.Parameter], chosen: Iterable[Setting]) -> inspect.Signature:
    return inspect.Signature([*own, _parameter("config", Annotated[Path | None, _FILE]), *map(_option, chosen)])


_ALL = [_parameter("help_all", Annotated[bool, _HELP_ALL], False)]


# Typer reads a command's options from its signature. Those of these commands are made from the settings.
for _command, _own, _chosen in (
    (serve, _ALL, list(settings())),
    (warm, _ALL, list(settings())),
    (doctor, _ALL, list(settings())),
    (plan, _PLAN_OPTIONS, [each for each in settings() if each.name in _PLANNED]),
):
    _command.__dict__["__signature__"] = _signature(_own, _chosen)
    app.command(cls=None if _command is plan else _SettingsCommand)(_command)


@app.command("tiny-model")
def tiny_model(
    kind: Annotated[
        Literal["qwen3", "qwen3-vl", "qwen3-5", "qwen3-moe", "qwen3-vl-moe", "qwen3-5-moe", "gpt-oss"],
        typer.Argument(
            help="qwen3, qwen3-moe and gpt-oss take text, the others images too; moe: a mixture of experts."
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(parser=_path, metavar="DIR", help="Directory to write to; created if it does not exist.")
    ],
    hidden: Annotated[int, typer.Option(help="Width of the hidden states (numbers per token).")] = 64,
    layers: Annotated[
        int | None,
        typer.Option(help="Number of decoder layers.", show_default="4 of qwen3-5 and qwen3-5-moe, 2 of others"),
    ] = None,
    vocab: Annotated[
        int, typer.Option(help="Rows of the embedding; the tokenizer has at most this many tokens.")
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the random weights; the same seed gives the same files.")] = 0,
) -> None:
    """Write a tiny random model to try things out.

    It has the format of a real model and a real tokenizer, and needs no download.
    """
    from tinsmith.models.tiny import write_tiny_model

    write_tiny_model(kind, directory, hidden=hidden, layers=layers, vocab=vocab, seed=seed)
    base_model = shlex.quote(f"tiny={directory}")
    typer.echo(f"wrote a random {kind} model to {directory}; serve it with: tinsmith serve --base-model {base_model}")


_Server = Annotated[
    str, typer.Argument(metavar="[URL]", envvar="TINKER_BASE_URL", help="URL of the server, without /api/v1.")
]


_Key = Annotated[str, typer.Option("--api-key", envvar="TINKER_API_KEY", help="Key that clients send.")]


@app.command()
def status(url: _Server = "http://127.0.0.1:8000", api_key: _Key = "") -> None:
    """Show what a running server does.

    Prints its models, their queues, tokens per second and memory.
    """
    from rich.console import Console

    from tinsmith.commands.status import fetch_status, print_status

    print_status(fetch_status(url, api_key), Console(highlight=False))


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(parser=_path, metavar="FILE", help="File to write, as JSON.")],
    url: _Server = "http://127.0.0.1:8000",
    minutes: Annotated[float, typer.Option(min=0.01, help="So many of the last minutes; a server keeps ten.")] = 10,
    api_key: _Key = "",
) -> None:
    """Write what a running server did in the last minutes, for ui.perfetto.dev.

    It shows what each worker did or waited for, each pass, and each operation and sample.
    """
    from tinsmith.commands.trace import write_trace

    typer.echo(write_trace(url, api_key, minutes, file))


@app.command()
def view(
    directory: Annotated[
        Path, typer.Argument(parser=_path, metavar="DIR", help="Directory of a run, or one with runs in it.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes any that is free.")] = 8001,
    server: Annotated[
        str,
        typer.Option(
            "--server", envvar="TINKER_BASE_URL", help="URL of the server that has the checkpoints, for links to chats."
        ),
    ] = "",
) -> None:
    """Show the episodes of reinforcement learning in a browser.

    It reads the files that `tinsmith rl` writes, of runs that are over or go on, and needs no server and no GPU.
    """
    from tinsmith.commands.view import view

    view(directory, port, server, typer.echo)


@app.command()
def ping(
    url: _Server = "http://127.0.0.1:8000",
    base_model: Annotated[str, typer.Option(help="Name of a base model that it is to serve.")] = "",
    api_key: _Key = "",
) -> None:
    """Say what keeps clients from a server.

    In about a second it names what is wrong: scheme, host, port, TLS, path, proxy, key, readiness or base model. The
    SDK would repeat its requests for minutes without a word. Exits with code 0 if the server can be used, else 2.
    """
    from tinsmith.commands.ping import ping

    typer.echo(ping(url, api_key, base_model))


_RlConfig = Annotated[
    Path,
    typer.Argument(
        parser=_path,
        metavar="CONFIG.yaml",
        help="Configuration of the run; docs/rl.md describes it, examples/rl/ has some.",
    ),
]


@app.command()
def rl(
    config: _RlConfig,
    new: Annotated[
        bool, typer.Option("--new", help="Begin another run, in a directory of its own beside that of the last one.")
    ] = False,
) -> None:
    """Train a model with reinforcement learning on a Tinker server.

    Started again with the same file, it resumes from its last checkpoint. The same as `tinsmith-rl`.
    """
    _reinforcement_learning(config, *(["--new"] if new else []))


@app.command("eval")
def evaluate(config: _RlConfig) -> None:
    """Evaluate a model in an environment.

    Samples episodes and prints rewards and metrics. Takes the same file as `rl`. The same as `tinsmith-rl --eval`.
    """
    _reinforcement_learning(config, "--eval")


def _reinforcement_learning(config: Path, *options: str) -> None:
    if importlib.util.find_spec("tinsmith_rl") is None:
        project = Path(__file__).parent.parent / "rl"
        where = (
            f"pip install -e '{project}'"
            if (project / "pyproject.toml").is_file()
            else "pip install ./rl in a clone of Tinsmith"
        )
        raise ConfigError(f"reinforcement learning is a package of its own, tinsmith-rl: {where}")
    from tinsmith_rl.__main__ import main

    main([*options, "--", str(config)])


_DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir", parser=_path, metavar="PATH", envvar="TINSMITH_DATA_DIR", help="Data directory of the server."
    ),
]


_KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")]
_keys = typer.Typer(
    help="Make and end API keys. With the first one, the server asks every client for a key, and may serve other "
    "machines. It notices changes within seconds.",
    no_args_is_help=True,
)
app.add_typer(_keys, name="keys")


@_keys.command("add")
def add_key(
    name: _KeyName,
    tenant: Annotated[
        str, typer.Option(help="Who owns what the key makes; keys of one tenant share it.", show_default="NAME")
    ] = "",
    role: Annotated[
        Literal["admin", "member", "read-only"],
        typer.Option(
            help="read-only looks and downloads; member also trains and samples; admin also manages what all have."
        ),
    ] = "member",
    project: Annotated[str | None, typer.Option(help="Project of its sessions that name none.")] = None,
    models: Annotated[
        list[str] | None, typer.Option(help="Name of a base model that it may use; repeat for several.")
    ] = None,
    max_models: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="NUMBER", help="Maximum number of models in training.")
    ] = None,
    max_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            metavar="NUMBER",
            help="Maximum number of unfinished sequences of samples, and of unfinished training operations.",
        ),
    ] = None,
    budget_tokens: Annotated[
        str | None,
        typer.Option(metavar="N/day", help="Tokens to train, prefill and sample from midnight to midnight, UTC."),
    ] = None,
    budget_gpu_seconds: Annotated[
        str | None, typer.Option(metavar="N/day", help="Seconds of GPUs from midnight to midnight, UTC.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of its checkpoints, such as 50GiB; a number is in GiB.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            metavar="NUMBER",
            help="Newest checkpoints that stay of each run, for training and for sampling; published ones stay, too.",
        ),
    ] = None,
    checkpoint_ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="The longest that a checkpoint lives: 30d, 12h.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="When it ends, from now: 90d, 12h.")] = None,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Make a key and print it, once: only a digest is kept.

    Limits hold for what all keys of the tenant use together; beyond them requests get HTTP 429.
    """
    from tinsmith.commands.keys import a_day, add, seconds_of, size_of
    from tinsmith.store.records import ApiKey

    key = ApiKey(
        name=name,
        key_id="",
        digest=b"",
        tenant=tenant or name,
        role=role,
        project_id=project,
        models=models or None,
        max_models=max_models,
        max_parallel=max_parallel,
        tokens_a_day=None if budget_tokens is None else int(a_day(budget_tokens, "--budget-tokens")),
        gpu_seconds_a_day=None if budget_gpu_seconds is None else a_day(budget_gpu_seconds, "--budget-gpu-seconds"),
        storage_bytes=None if storage is None else size_of(storage),
        expires_at=None if expires is None else time.time() + seconds_of(expires, "--expires"),
        kept_checkpoints=keep_checkpoints,
        checkpoint_ttl_s=None if checkpoint_ttl is None else seconds_of(checkpoint_ttl, "--checkpoint-ttl"),
    )
    typer.echo(add(data_dir, key))


@_keys.command("list")
def list_keys(data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """List all keys, with their tenants, roles and limits."""
    from rich.console import Console

    from tinsmith.commands.keys import listed

    Console(highlight=False).print(listed(data_dir))


@_keys.command("rotate")
def rotate_key(name: _KeyName, data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """Print a new key in the place of an old one, which ends; tenant, role and limits stay."""
    from tinsmith.commands.keys import rotate

    typer.echo(rotate(data_dir, name))


@_keys.command("revoke")
def revoke_key(name: _KeyName, data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """End a key. What its tenant has stays."""
    from tinsmith.commands.keys import revoke

    revoke(data_dir, name)
    typer.echo(f"the key {name!r} is revoked")


_checkpoints = typer.Typer(
    help="List checkpoints, and bring back what was deleted in the last 24 hours.", no_args_is_help=True
)
app.add_typer(_checkpoints, name="checkpoints")
_CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help="Path of a deleted checkpoint: tinker://...")]


@_checkpoints.command("list")
def list_checkpoints(data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """List all checkpoints, with owner, size, and when they go."""
    from rich.console import Console

    from tinsmith.commands.checkpoints import listed

    Console(highlight=False).print(listed(data_dir))


@_checkpoints.command("restore")
def restore_checkpoint(path: _CheckpointPath, data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """Bring a deleted checkpoint back."""
    from tinsmith.commands.checkpoints import restore

    restore(data_dir, path)
    typer.echo(f"{path} is back")


@_checkpoints.command("purge")
def purge_checkpoint(path: _CheckpointPath, data_dir: _DataDir = Path("tinsmith-data")) -> None:
    """Delete a deleted checkpoint for good, which frees its storage: within a minute, or with `tinsmith gc`."""
    from tinsmith.commands.checkpoints import purge

    purge(data_dir, path)
    typer.echo(f"{path} goes within a minute")


@app.command()
def usage(
    days: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Days to add up, today included, in UTC.")] = 1,
    by_hour: Annotated[bool, typer.Option("--by-hour", help="Print a line for each hour.")] = False,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Show what tenants have used: tokens, seconds of GPUs and storage."""
    from rich.console import Console

    from tinsmith.commands.usage import usage

    Console(highlight=False).print(usage(data_dir, days, by_hour))


_ExportPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The checkpoint: tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME.",
    ),
]
_Merge = Annotated[bool, typer.Option("--merge", help="Write a complete transformers model instead of a PEFT adapter.")]
_Gguf = Annotated[
    bool, typer.Option("--gguf", help="Write a GGUF file for llama.cpp, and a Modelfile for Ollama, instead.")
]
_MovedBase = Annotated[
    str | None,
    typer.Option(
        help="The base model as [NAME=]PATH_OR_HUB_ID, if it is no longer where it was when the model was trained, or "
        "is to have another name in the export."
    ),
]


@app.command("export")
def export_checkpoint(
    path: _ExportPath,
    directory: Annotated[
        Path, typer.Argument(parser=_path, metavar="DIR", help="Directory to write to; created if it does not exist.")
    ],
    merge: _Merge = False,
    gguf: _Gguf = False,
    base_model: _MovedBase = None,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Write a checkpoint as a PEFT adapter or a merged model, with a model card."""
    _end_in_order()
    require_empty(directory)
    _require_exportable(data_dir, path, merge, gguf, base_model)
    from tinsmith.commands.exchange import export_checkpoint

    export_checkpoint(data_dir, path, directory, merge, gguf, base_model)
    if gguf:
        kind = f"{'the model' if merge else 'the adapter'} in GGUF"
    else:
        kind = "a transformers model" if merge else "a PEFT adapter"
    typer.echo(f"wrote {kind} to {directory}")


def _require_exportable(data_dir: Path, path: str, merge: bool, gguf: bool, base_model: str | None) -> None:
    """Raise what is wrong with a checkpoint or its base before torch is imported, which takes seconds."""
    if gguf and importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"--gguf needs the package gguf; install it with: {installer('gguf')}")
    source = None if base_model is None else base_model_source(base_model)[1]
    from tinsmith.models.files import require_usable
    from tinsmith.store.store import base_of_saved

    trained_on = base_of_saved(data_dir, path)
    require_usable([each for each in [source or trained_on] if each is not None], whole=merge)


@app.command("push-hf")
def push_to_hub(
    path: _ExportPath,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="The repository: OWNER/NAME; made if it is new.")],
    merge: _Merge = False,
    gguf: _Gguf = False,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody read a repository that is new; else only you do.")
    ] = False,
    base_model: _MovedBase = None,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Export a checkpoint to a repository of the Hugging Face Hub, or of another hub that HF_ENDPOINT names.

    It signs in with HF_TOKEN, or as `hf auth login` did.
    """
    _end_in_order()
    _require_exportable(data_dir, path, merge, gguf, base_model)
    from tinsmith.commands.push import push, require_repository

    require_repository(repository, public)
    typer.echo(push(data_dir, path, repository, merge, gguf, base_model))


@app.command("import")
def import_adapter(
    adapter: Annotated[
        Path,
        typer.Argument(
            parser=_path,
            metavar="DIR",
            help="Directory of the PEFT adapter, with adapter_config.json and adapter_model.safetensors.",
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new checkpoint.")],
    base_model: Annotated[
        str,
        typer.Option(help="The adapter's base model as [NAME=]PATH_OR_HUB_ID, exactly as given to `tinsmith serve`."),
    ],
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Import a PEFT adapter as a checkpoint.

    Prints two paths: one to train further from, one to sample.
    """
    _end_in_order()
    _, source = base_model_source(base_model)
    from tinsmith.models.files import require_usable

    require_usable([source], whole=False)
    from tinsmith.store.store import opened
    from tinsmith.training.peft_config import require_peft
    from tinsmith.wire.paths import imported_paths

    with opened(data_dir) as store:
        store.require_unused(map(str, imported_paths(name)))
    require_peft(adapter)
    from tinsmith.commands.exchange import import_adapter  # which takes seconds

    for path in import_adapter(data_dir, adapter, name, base_model):
        typer.echo(path)


@app.command()
def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also delete complete checkpoints that are not in the database.")
    ] = False,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Delete expired checkpoints and unused files.

    Unused are files that no checkpoint refers to, such as those that a crash left behind.

    It may run while the server runs. The server itself deletes the same files within a minute, except those of
    --unknown.
    """
    from tinsmith.commands.gc import collect_garbage

    for line in collect_garbage(data_dir, dry_run, unknown):
        typer.echo(line)


@app.command()
def backup(
    directory: Annotated[
        Path,
        typer.Argument(parser=_path, metavar="DIR", help="Directory to copy to; it must be empty or not exist yet."),
    ],
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Copy a data directory, also while its server runs.

    The copy has all checkpoints; `tinsmith serve --data-dir DIR` serves it.
    """
    _end_in_order()
    from tinsmith.commands.backup import back_up

    for line in back_up(data_dir, directory):
        typer.echo(line)


@app.command()
def restore(
    directory: Annotated[
        Path, typer.Argument(parser=_path, metavar="DIR", help="Directory that `tinsmith backup` has made.")
    ],
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Make a data directory, which must be empty or not exist yet, of a backup, which stays as it is.

    Every checkpoint is compared with its digests. Models that were loaded when the backup was made are lost: go on from
    their checkpoints.
    """
    _end_in_order()
    from tinsmith.commands.backup import back_up

    for line in back_up(directory, data_dir):
        typer.echo(line)


@app.command()
def recover(
    checkpoint_root: Annotated[
        str,
        typer.Option(
            envvar="TINSMITH_CHECKPOINT_ROOT",
            help="Look for checkpoints here too: the --checkpoint-root of this server, used by no other server.",
        ),
    ] = "",
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Add checkpoints to the database that are missing in it.

    They may be missing after the database was restored from an older copy. Only complete ones are added.
    """
    from tinsmith.commands.recover import recover

    for line in recover(data_dir, checkpoint_root):
        typer.echo(line)


if __name__ == "__main__":
    main()
