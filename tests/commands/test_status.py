"""`tinsmith status` prints names as they are, and what a foreign server says as no commands to the terminal."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.answering import answering
from tinsmith.commands.status import fetch_status, print_status
from tinsmith.errors import ConfigError
from tinsmith_rl.evaluation import print_metrics

SESSION = "0c9c5a3e-5f2b-4b9e-8b0e-3f6b1f0f8f53"


def test_names_are_no_markup_and_no_emoji() -> None:
    console = Console(file=StringIO(), record=True, width=200, highlight=False)
    base = {"name": "org/[bold]x:car:", "architecture": "qwen3", "max_context": 4096, "takes_images": False}
    model = {"model_id": f"{SESSION}:train:0", "base_model": base["name"], "queued": 1, "trained_tokens": 2000}
    status = {
        "workers": [{"pid": 4711, "device": "cuda:0", "state": "ready", "pass_tokens": 54321}],
        "version": "0.1",
        "engine": {"state": "starting", "reason": "loading org/[bold]x:car:", "busy_s": 72.4},
        "base_models": [base],
        "models": [model],
        "samples": {"running": 1, "waiting": 0},
        "tokens_per_second": {"training": 1.0, "sampling": 2.0},
        "memory_bytes": {"resident": 2**20},
        "graphs": {"compiled": 1200, "captured": 7},
    }
    print_status(status, console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "Tinsmith 0.1, loading org/[bold]x:car:"
    assert {
        "4711 cuda:0 ready 54,321",
        "org/[bold]x:car: qwen3 4,096 no",
        f"{SESSION}:train:0 org/[bold]x:car: 1 2,000",
    } < set(lines)
    assert lines[-2:] == ["engine memory: 1 MiB resident", "graphs of operations: 1,200 compiled, 7 captured"]
    console = Console(file=StringIO(), record=True, width=40)
    path = f"tinker://{SESSION}:train:0/sampler_weights/[best]-000001"
    print_metrics(path, {"env/:car:": 1.0}, console)
    lines = console.export_text().splitlines()
    assert (lines[0], "│ env/:car: │ 1     │" in lines) == (path, True)


def test_an_answer_of_a_foreign_server_is_escaped_and_one_without_an_engine_refused() -> None:
    with answering({"/api/v1/status": (200, {"engine": {"reason": "\x1b[2J"}})}) as url:
        assert fetch_status(url) == {"engine": {"reason": r"\x1b[2J"}}
    contents: list[Any] = [{}, [1]]
    for content in contents:
        with (
            answering({"/api/v1/status": (200, content)}) as url,
            pytest.raises(ConfigError, match=r"the answer has no key 'engine'$"),
        ):
            fetch_status(url)
