"""The command line: `tinsmith-rl CONFIG.yaml` trains, `tinsmith-rl --eval CONFIG.yaml` only evaluates."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith_rl.config import begin_another, load
from tinsmith_rl.errors import RlError, printable
from tinsmith_rl.reach import require_server
from tinsmith_rl.settings import at_home


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An error that a user can mend ends in one line on standard error and exit code 2.

    That includes an error of the operating system about a file, such as one that cannot be read.
    """
    about = (
        "Train a model with reinforcement learning on a Tinker server. Started again with the same file, it resumes."
    )
    parser = argparse.ArgumentParser("tinsmith-rl", description=about)
    parser.add_argument(
        "config", type=_path, metavar="CONFIG.yaml", help="configuration of the run, which docs/rl.md describes"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--new", action="store_true", help="begin another run, in a directory of its own beside that of the last one"
    )
    only.add_argument(
        "--eval", action="store_true", help="sample episodes and print rewards and metrics, without training"
    )
    given = parser.parse_args(arguments)
    # Such as that there is no PyTorch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        _run(given.config, given.new, given.eval)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RlError as error:
        # It may quote what a server said
        print("tinsmith-rl:", "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"tinsmith-rl: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _path(text: str) -> Path:
    return Path(at_home(text))


def _run(file: Path, new: bool, evaluates: bool) -> None:
    config = load(file)
    if new:
        begin_another(config)
    require_server(config.server)  # before the next imports, which take seconds
    if evaluates:
        from rich.console import Console

        from tinsmith_rl.evaluation import run_evaluation

        run_evaluation(config, Console(highlight=False))
    else:
        from tinsmith_rl.trainer import train

        train(config)


if __name__ == "__main__":
    main()
