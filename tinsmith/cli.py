"""The commands that a person types, such as `tinsmith serve`.

Every setting of `tinsmith/config.py` becomes one option of `serve` and `doctor`, with the help, unit and default that stand there.
A command imports the rooms that it needs, and help is printed without Rich's markup: `tinsmith --help` answers at once.
"""

import inspect
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tinsmith import __version__
from tinsmith.config import Config, Knob, base_model_sources, knobs, load
from tinsmith.errors import ConfigError, TinsmithError

app = typer.Typer(
    name="tinsmith",
    help="A self-hosted server for the Tinker API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. What cannot work ends in one line on standard error and exit code 2.

    So does an error of the operating system that names a file: one that cannot be read or written.
    """
    try:
        app()
    except TinsmithError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"tinsmith: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tinsmith {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """A self-hosted server for the Tinker API: fine-tune and sample language and vision-language models on your own hardware."""


def serve(config: Path | None, **options: Any) -> None:
    """Serve base models to Tinker clients until Ctrl-C.

    An option given here overrides the same key of the --config file, which overrides the default.
    """
    configuration = _configuration(config, options)
    base_model_sources(configuration)
    from tinsmith.vllm.installed import require_vllm

    require_vllm(configuration)  # before the next import, which takes a second
    from tinsmith.server.main import run_server

    run_server(configuration)


def doctor(config: Path | None, **options: Any) -> None:
    """Say what this machine offers, what fits on it and what is missing; exit code 1 if something is.

    Takes the options of `serve`: with --base-model it estimates the memory that the model would need.
    """
    configuration = _configuration(config, options)
    from rich.console import Console

    from tinsmith.doctor import run_doctor

    raise typer.Exit(run_doctor(configuration, Console(highlight=False)))


def _configuration(file: Path | None, options: dict[str, Any]) -> Config:
    """The configuration of `serve` and `doctor`. Raises ConfigError as `load`, and for an option that would have no effect."""
    given = {name: value for name, value in options.items() if value is not None}
    config = load(file, given)
    sampler = config.sampling.sampler
    unused = [option_name(knob) for knob in knobs() if knob.path[0] == "vllm" and knob.name in given]
    if sampler != "vllm" and unused:
        raise ConfigError(f"{', '.join(unused)} has no effect with sampler={sampler}; add --sampler vllm, or leave it out")
    return config


def option_name(knob: Knob) -> str:
    """`--kv-cache-gib` for the knob `kv_cache_gib`; an option that is repeated to fill a list is named in the singular."""
    name = knob.name.removesuffix("s") if typing.get_origin(knob.type) is list else knob.name
    return f"--{name.replace('_', '-')}"


def _option(knob: Knob) -> inspect.Parameter:
    default = "" if knob.default in ("", []) else f"default: {knob.default}"
    notes = ", ".join(note for note in (knob.unit, default) if note)
    is_number = knob.type in (int, float)
    option = typer.Option(
        option_name(knob),
        help=f"{knob.help} [{notes}]" if notes else knob.help,
        show_default=False,
        metavar="<number>" if is_number else None,
    )
    # Numbers come as texts, which config_values.py reads: 2GiB is one. None tells "not given" from "given the default": only what is given
    # overrides the file.
    kind = str if is_number else knob.type
    return inspect.Parameter(knob.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _knob_signature() -> inspect.Signature:
    file = typer.Option("--config", metavar="FILE.yaml", help="File with the same settings by section, such as 'server: {port: 9000}'")
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file])
    return inspect.Signature([config, *map(_option, knobs())])


# Typer reads a command's options from its signature, and these are generated from the configuration tree.
for _command in (serve, doctor):
    _command.__dict__["__signature__"] = _knob_signature()
    app.command()(_command)


@app.command("tiny-model")
def tiny_model(
    kind: Annotated[Literal["qwen3", "qwen3-vl"], typer.Argument(help="Text only, or text and images.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; created if it is not there.")],
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.")] = 64,
    layers: Annotated[int, typer.Option(help="Number of decoder layers.")] = 2,
    vocab: Annotated[int, typer.Option(help="Rows of the embedding; the tokenizer has at most as many tokens.")] = 2048,
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 0,
) -> None:
    """Write a tiny random model with a real tokenizer, for tests and for trying things out."""
    from tinsmith.models.tiny import write_tiny_model

    write_tiny_model(kind, directory, hidden=hidden, layers=layers, vocab=vocab, seed=seed)
    typer.echo(f"wrote a random {kind} model to {directory}; serve it with: tinsmith serve --base-model tiny={directory}")


@app.command()
def status(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
) -> None:
    """Show a running server: its models, their queues, tokens per second and memory."""
    from rich.console import Console

    from tinsmith.status import fetch_status, print_status

    print_status(fetch_status(url), Console(highlight=False))


_RlConfig = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="See docs/rl.md and examples/.")]


@app.command()
def rl(config: _RlConfig) -> None:
    """Train a model on a Tinker server with reinforcement learning; started again, go on where it stopped."""
    from tinsmith.rl.config import load
    from tinsmith.rl.reach import require_server

    configuration = load(config)
    require_server(configuration.server)  # before the next import, which takes seconds
    from tinsmith.rl.trainer import train

    train(configuration)


@app.command("eval")
def evaluate(config: _RlConfig) -> None:
    """Sample a model in an environment and report rewards and metrics; takes the file of `rl`."""
    from rich.console import Console

    from tinsmith.rl.config import load
    from tinsmith.rl.reach import require_server

    configuration = load(config)
    require_server(configuration.server)
    from tinsmith.rl.evaluation import run_evaluation

    run_evaluation(configuration, Console(highlight=False))


_DataDir = Annotated[Path, typer.Option("--data-dir", help="The server's data directory.")]


@app.command("export")
def export_checkpoint(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: tinker://MODEL_ID/weights/NAME or .../sampler_weights/NAME.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; created if it is not there.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write a whole transformers model, not a PEFT adapter.")] = False,
    base_model: Annotated[str | None, typer.Option(help="Where its base model is now, if it has moved: path or Hub id.")] = None,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Write a checkpoint as a PEFT adapter, or merged into its base model."""
    from tinsmith.exchange import export_checkpoint

    export_checkpoint(data_dir, path, directory, merge, base_model)
    typer.echo(f"wrote {'a transformers model' if merge else 'a PEFT adapter'} to {directory}")


@app.command("import")
def import_adapter(
    adapter: Annotated[Path, typer.Argument(metavar="DIR", help="A PEFT adapter: adapter_config.json and adapter_model.safetensors.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the checkpoint that it becomes.")],
    base_model: Annotated[str, typer.Option(help="Its base model as [NAME=]PATH_OR_HUB_ID, just as the server is given it.")],
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Make a PEFT adapter a checkpoint to start from, for training and for sampling."""
    from tinsmith.exchange import import_adapter

    for path in import_adapter(data_dir, adapter, name, base_model):
        typer.echo(path)


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    unknown: Annotated[bool, typer.Option("--unknown", help="Delete complete checkpoints that the database does not know, too.")] = False,
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Delete what nobody can reach any more: expired checkpoints, files that no checkpoint has, what a crash left.

    It may run beside the server, which deletes the same by itself within a minute, but for the files of --unknown.
    """
    from tinsmith.garbage import collect_garbage

    for line in collect_garbage(data_dir, dry_run, unknown):
        typer.echo(line)


@app.command()
def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the copy goes: a directory that is empty or not there yet.")],
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Copy a data directory with all checkpoints, also while its server runs; `tinsmith serve --data-dir DIR` goes on from the copy."""
    from tinsmith.backup import back_up

    for line in back_up(data_dir, directory):
        typer.echo(line)


@app.command()
def recover(
    checkpoint_root: Annotated[str, typer.Option(help="Look there too: a --checkpoint-root that no other server uses.")] = "",
    data_dir: _DataDir = Path("tinsmith-data"),
) -> None:
    """Register complete checkpoints that the database does not know, such as after an older or a new database was put in its place."""
    from tinsmith.recovery import recover

    for line in recover(data_dir, checkpoint_root):
        typer.echo(line)


if __name__ == "__main__":
    main()
