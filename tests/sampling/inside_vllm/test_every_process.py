"""PyPI's torchvision, torchaudio and torchcodec beside a CPU build of PyTorch, as each process of a vLLM server meets them."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.preloaded import REAL_PYTHON
from tinsmith.sampling.inside_vllm import every_process

pytestmark = pytest.mark.skipif(not torch.__version__.endswith("+cpu"), reason="this PyTorch is no CPU build")

DESCRIBES_NMS = '@__import__("torch").library.register_fake("torchvision::nms")\ndef nms(dets, scores, threshold): ...\n'
"""What torchvision does at import, whether its C++ side has been loaded or not."""


def environment(directory: Path) -> dict[str, str]:
    """Of a process that finds a torchvision without its C++ side, a torchaudio that does not load, and our `sitecustomize`."""
    packages = directory / "packages"
    for name, module, content in (
        ("torchvision", "__init__", "from torchvision import _meta_registrations"),
        ("torchvision", "_meta_registrations", DESCRIBES_NMS),
        ("torchaudio", "__init__", "raise OSError('Could not load this library')"),
    ):
        for path, text in (
            (packages / name / f"{module}.py", content),
            (packages / f"{name}-0.28.0.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n"),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (directory / "sitecustomize.py").symlink_to(every_process.__file__)
    return os.environ | {"PYTHONPATH": f"{directory}:{packages}"}


def run(code: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([REAL_PYTHON, "-c", code], capture_output=True, text=True, check=False, env=more)


def test_torchvision_can_be_imported_and_torchaudio_is_not_there(tmp_path: Path) -> None:
    env = environment(tmp_path)
    ended = run("import torchvision, importlib.util; print(importlib.util.find_spec('torchaudio'))", **env)
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr
    (tmp_path / "sitecustomize.py").unlink()
    assert "operator torchvision::nms does not exist" in run("import torchvision", **env).stderr
    assert "Could not load this library" in run("import torchaudio", **env).stderr


def test_the_sitecustomize_of_the_environment_runs_too(tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "packages" / "sitecustomize.py").write_text("print('hidden', __name__)")
    assert run("import torchvision", **env).stdout == "hidden sitecustomize\n"
