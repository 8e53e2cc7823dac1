"""Where the cookbook's recipes run: a directory that stands for the Hub, and the environment that has the recipes.

A recipe runs as from a shell, in that directory: transformers and datasets take `./ORG/NAME` for the model or dataset
of that name. Its process is forked from one that has imported what all recipes import, which takes ten seconds of a
core.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.running import tinsmith

LAST_WORDS = ("completed successfully", "Training completed", "Results saved to")
"""What recipes say when they are done."""

PYTHON = Path(__file__).parents[2] / ".venv-recipes" / "bin" / "python"
BASE_MODEL, CHAT_MODEL, SMALL_MODEL = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B"
"""What most recipes train by default. Tiny models of the same family are served under these names."""
TEXT_ONLY_MODEL = "Qwen/Qwen3-8B"
"""The default of recipes that have not moved on from Qwen3; here a tiny Qwen3."""
MIXTURE, LARGE_MIXTURE = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-397B-A17B"
"""Defaults that are mixtures of experts; here tiny ones of that family."""
GPT_OSS = "openai/gpt-oss-20b"
"""No default: recipes are asked for it by its name."""

FAMILIES = {
    "untied": "llama",
    "tied": "qwen3",
    "vision": "qwen3_vl",
    "vision-renamed": "qwen2_5_vl",
    "vision-hybrid": "qwen3_5",
    "experts": "qwen3_moe",
    "experts-in-turns": "gpt_oss",
    "vision-experts": "qwen3_5_moe",
}
"""Tiny models of families, by the name under which they are served."""

FORKS = """
import json, os, runpy, sys
import datasets, torch, transformers
import tinker_cookbook.rl.train, tinker_cookbook.supervised.train

for line in sys.stdin:
    output, environment, module, options = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, file in enumerate((os.devnull, output, output)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(environment)
        sys.argv = [module, *options]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks itself for each line that it reads, runs a module there, and writes the exit code."""


@contextmanager
def forking(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process from which all recipes are forked."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [str(PYTHON), "-c", FORKS], cwd=directory, env=environment, start_new_session=True, **pipes
    ) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)  # with a recipe that hangs


@dataclass(frozen=True)
class Outcome:
    """What a recipe leaves behind."""

    exit_code: int
    output: str
    """Standard output and standard error, as they came."""
    rows: list[dict[str, Any]]
    """metrics.jsonl: a row per step."""
    checkpoints: list[dict[str, Any]]
    """checkpoints.jsonl, the last checkpoint last."""

    def curve(self, metric: str) -> list[float]:
        """The values of a metric, from the first step to the last."""
        return [row[metric] for row in self.rows if metric in row]

    @property
    def sampler_path(self) -> str:
        """The last checkpoint to sample."""
        return str(self.checkpoints[-1]["sampler_path"])


@dataclass(frozen=True)
class Workshop:
    """The directory with the stand-ins, and the server that recipes talk to."""

    directory: Path
    url: str
    data_dir: Path
    """The server's."""
    forks: "subprocess.Popen[str]"

    def run(self, recipe: str, *options: str) -> Outcome:
        """`python -m tinker_cookbook.recipes.RECIPE OPTION...`, to its end.

        An option `log_path=NAME` is where the outcome is read from.
        """
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        output, environment = (
            self.directory / f"output of {recipe}",
            {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-recipes"},
        )
        output.unlink(missing_ok=True)
        asked = [str(output), environment, f"tinker_cookbook.recipes.{recipe}", options]
        print(json.dumps(asked), file=self.forks.stdin, flush=True)
        exit_code = int(self.forks.stdout.readline())
        logs = [option.partition("=")[2] for option in options if option.startswith(("log_path=", "experiment_dir="))]
        return Outcome(
            exit_code, output.read_text(), *(self._rows(logs, name) for name in ("metrics.jsonl", "checkpoints.jsonl"))
        )

    def completed(self, recipe: str, *options: str) -> Outcome:
        """The outcome of a recipe that must succeed."""
        outcome = self.run(recipe, *options)
        # The SDK's HTTP library aborts a Python 3.11 that ends while an answer comes in. A recipe ends that way now and
        # then, after it has said that it is done.
        aborted_at_exit = outcome.exit_code == -signal.SIGABRT and any(words in outcome.output for words in LAST_WORDS)
        assert outcome.exit_code == 0 or aborted_at_exit, f"exit code {outcome.exit_code}: {outcome.output[-6000:]}"
        return outcome

    def _rows(self, logs: list[str], name: str) -> list[dict[str, Any]]:
        files = [file for log in logs for file in (self.directory / log).rglob(name)]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def merge(self, checkpoint: str, model: Path) -> None:
        """Write a checkpoint as a model of its own: `tinsmith export --merge`."""
        done = tinsmith("export", checkpoint, str(model), "--merge", "--data-dir", str(self.data_dir))
        assert done.returncode == 0, done.stderr
