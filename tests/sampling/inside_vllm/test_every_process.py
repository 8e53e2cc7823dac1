"""PyPI's torchvision, torchaudio and torchcodec beside a CPU build of PyTorch, as each process of a vLLM server meets
them."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.preloaded import REAL_PYTHON
from tinsmith.sampling.inside_vllm import every_process

pytestmark = pytest.mark.skipif(not torch.__version__.endswith("+cpu"), reason="this PyTorch is no CPU build")

DESCRIBES_NMS = (
    '@__import__("torch").library.register_fake("torchvision::nms")\ndef nms(dets, scores, threshold): ...\n'
)
"""What torchvision does at import, whether its C++ side has been loaded or not."""


def run(code: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """Python that finds what lies in `directory` and in its packages."""
    environment = os.environ | {"PYTHONPATH": f"{directory}:{directory / 'packages'}"}
    return subprocess.run([REAL_PYTHON, "-c", code], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow  # two imports of PyTorch, 4 core-seconds, for a path that changes with the versions of vLLM alone
def test_torchvision_can_be_imported_torchaudio_is_not_there_and_the_environments_sitecustomize_runs_too(
    tmp_path: Path,
) -> None:
    """There is a torchvision without its C++ side, and a torchaudio that does not load."""
    packages = tmp_path / "packages"
    for name, module, content in (
        ("torchvision", "__init__", "from torchvision import _meta_registrations"),
        ("torchvision", "_meta_registrations", DESCRIBES_NMS),
        ("torchaudio", "__init__", "raise OSError('Could not load this library')"),
    ):
        for path, text in (
            (packages / name / f"{module}.py", content),
            (
                packages / f"{name}-0.28.0.dist-info" / "METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n",
            ),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (packages / "sitecustomize.py").write_text("print('hidden', __name__)")
    ours = tmp_path / "sitecustomize.py"
    ours.symlink_to(every_process.__file__)
    ended = run("import torchvision, importlib.util; print(importlib.util.find_spec('torchaudio'))", tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "hidden sitecustomize\nNone\n"), ended.stderr
    ours.unlink()
    errors = run(
        "try:\n  import torchvision\nexcept RuntimeError as error:\n  print(error)\nimport torchaudio", tmp_path
    )
    assert "operator torchvision::nms does not exist" in errors.stdout
    assert "Could not load this library" in errors.stderr
