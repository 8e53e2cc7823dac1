"""The README's snippet does what it says, and leaves no model behind."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.running import Server

README = Path(__file__).parent.parent.parent / "README.md"


def test_the_snippet_trains_samples_and_leaves_no_model_loaded(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert snippet is not None
    code = snippet[1].replace("http://127.0.0.1:8000", server.url).replace("Qwen/Qwen3.5-4B", "text")
    assert server.url in code
    assert 'base_model="text"' in code
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    losses = [float(loss) for loss in re.findall(r"'loss:sum': ([\d.]+)", "\n".join(printed[:10]))]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"\[\d+(, \d+){0,7}\]", printed[10])
    # The engine unloads beside the answer that the session is finished. Other tests' models may come and stay.
    server.wait_for_status(
        lambda status: names["model"].model_id not in [model["model_id"] for model in status["models"]]
    )
