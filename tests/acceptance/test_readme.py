"""The README's snippet does what it says, and leaves no model behind."""

import re
import time
from pathlib import Path

import pytest

from tests.running import Server

README = Path(__file__).parent.parent.parent / "README.md"


def snippet(url: str, base_model: str) -> str:
    """The first Python block, for another server and model."""
    match = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    code = match[1].replace("http://127.0.0.1:8000", url).replace("Qwen/Qwen3.5-4B", base_model)
    assert url in code
    assert f'base_model="{base_model}"' in code
    return code


def test_the_snippet_trains_samples_and_leaves_no_model_loaded(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def loaded() -> set[str]:
        with server.client() as client:
            return {model["model_id"] for model in client.get("status").json()["models"]}

    before = loaded()
    exec(compile(snippet(server.url, "text"), str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    losses = [float(loss) for loss in re.findall(r"'loss:sum': ([\d.]+)", "\n".join(printed[:10]))]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"\[\d+(, \d+){0,7}\]", printed[10])
    while loaded() - before:  # the engine unloads beside the answer that the session is finished
        time.sleep(0.05)
