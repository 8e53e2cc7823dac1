"""Exports without a server, from the checkpoints that an import has made."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bases import random_adapter
from tests.preloaded import REAL_PYTHON
from tests.running import limited_program, tinsmith_here
from tinsmith.commands.exchange import _whole, import_adapter
from tinsmith.config_values import require_empty
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.files import read_header
from tinsmith.store.store import Store
from tinsmith.training.peft_format import write_peft


@pytest.fixture
def base(family_dir: Callable[[str], Path]) -> Path:
    """The directory of a base model."""
    return family_dir("qwen3")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory that holds nothing yet."""
    (tmp_path / "data").mkdir()
    Store.open(tmp_path / "data").close()
    return tmp_path / "data"


@pytest.fixture
def checkpoint(data: Path, base: Path, text_base: BaseModel, tmp_path: Path) -> str:
    """The path of an imported adapter."""
    write_peft(random_adapter(text_base, rank=64), text_base.layout, "x", tmp_path / "adapter")
    return import_adapter(data, tmp_path / "adapter", "a", f"text={base}")[0]


@pytest.mark.parametrize(
    ("merge", "there"), [([], False), (["--merge"], True)], ids=["adapter to a new place", "merged to an empty one"]
)
def test_an_export_that_fails_leaves_nothing_and_can_be_repeated(
    merge: list[str], there: bool, checkpoint: str, data: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "model"
    if there:
        target.mkdir(parents=True)
    command = ["export", checkpoint, str(target), "--data-dir", str(data), *merge]
    limited = [*limited_program(resource.RLIMIT_FSIZE, 100_000), *command]
    failed = subprocess.run(limited, capture_output=True, text=True, check=False)
    (line,) = [
        line
        for line in failed.stderr.splitlines()
        if not line.startswith(("Loading weights: ", "Writing model shards: ")) and line
    ]
    assert failed.returncode == 2
    assert line.startswith(f"tinsmith: {target} cannot be written: ")
    assert target.exists() == there
    assert list((tmp_path / "out").rglob("*")) == [target] * there
    assert tinsmith_here(*command).returncode == 0
    assert target.stat().st_mode == (tmp_path / "out").stat().st_mode
    assert "config.json" in {file.name.removeprefix("adapter_") for file in target.iterdir()}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_experts_come_back_from_what_is_exported(
    family: str,
    family_base: Callable[[str], BaseModel],
    family_dir: Callable[[str], Path],
    data: Path,
    tmp_path: Path,
) -> None:
    """Adapter, checkpoint and adapter again are the same, byte for byte; the merged model has all of its base."""
    source, layout = family_dir(family), family_base(family).layout
    write_peft(random_adapter(family_base(family), seed=3), layout, "tiny", tmp_path / "adapter")
    base, beside = ["--base-model", f"tiny={source}"], ["--data-dir", str(data)]
    imported = tinsmith_here("import", str(tmp_path / "adapter"), "a", *base, *beside)
    path = imported.stdout.split()[0]
    for target, merge in (("again", []), ("merged", ["--merge"])):
        assert tinsmith_here("export", path, str(tmp_path / target), *merge, *beside).returncode == 0
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    before, after = (read_header(place / "model.safetensors")[1] for place in (source, tmp_path / "merged"))
    was_embedding = set() if family == "gpt_oss" else {"lm_head.weight"}
    assert after.keys() - before.keys() == was_embedding
    assert {name: after[name]["shape"] for name in before} == {name: entry["shape"] for name, entry in before.items()}


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of it fails
from tinsmith.cli import main
for arguments in json.load(sys.stdin):
    sys.argv = ["tinsmith", *arguments]
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
"""


def refused_without_torch(commands: list[list[str]]) -> list[str]:
    """What each of these commands, which all fail, says in its line."""
    program, given = [REAL_PYTHON, "-c", WITHOUT_TORCH], json.dumps(commands)
    done = subprocess.run(program, input=given, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"] * len(commands), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands), done.stderr
    return lines


def test_what_is_wrong_with_a_base_is_said_before_torch_is_imported(
    checkpoint: str, data: Path, base: Path, tmp_path: Path
) -> None:
    """That of the checkpoint, where none is named."""
    gone, damaged = tmp_path / "gone", Path(shutil.copytree(base, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"version https://git-lfs")
    for file in data.rglob("checkpoint.json"):
        assert file.read_text().count(str(base)) == 1
        file.write_text(file.read_text().replace(str(base), str(gone)))
    export = ["export", checkpoint, str(tmp_path / "out"), "--data-dir", str(data)]
    absent, pointer = refused_without_torch([export, [*export, "--base-model", str(damaged)]])
    assert absent.startswith(f"tinsmith: {gone}, where the base model was, is no directory")
    assert pointer.startswith(f"tinsmith: {damaged}/model.safetensors is a pointer of Git LFS")


IMPORTS: list[tuple[str, dict[str, bytes], str]] = [
    ("a", {}, "tinker://imported/weights/a and tinker://imported/sampler_weights/a exist already"),
    ("a%", {}, "path='a%' cannot name a checkpoint"),
    ("b", {}, "is no PEFT adapter: it must hold adapter_config.json and adapter_model.safetensors"),
    ("b", {"adapter_model.safetensors": b"\x09" * 8}, "adapter_model.safetensors is damaged or cut (8 bytes"),
    ("b", {"adapter_model.safetensors": b"\x02" + bytes(7) + b"{}"}, "peft_type='' of PEFT cannot be used"),
]


@pytest.mark.usefixtures("checkpoint")
def test_what_is_wrong_with_an_import_is_said_before_torch_is_imported(data: Path, base: Path, tmp_path: Path) -> None:
    commands = []
    for number, (name, files, _) in enumerate(IMPORTS):
        adapter = tmp_path / str(number)
        adapter.mkdir()
        for file, content in (files and {"adapter_config.json": b'{"peft_type": ""}'} | files).items():
            (adapter / file).write_bytes(content)
        commands.append(["import", str(adapter), name, "--base-model", str(base), "--data-dir", str(data)])
    told = refused_without_torch(commands)
    assert [said in line for (_, _, said), line in zip(IMPORTS, told, strict=True)] == [True] * len(IMPORTS), told


ENDS_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from tinsmith.cli import _end_in_order
from tinsmith.commands.exchange import _whole

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
_end_in_order()
with _whole(Path(sys.argv[1])) as files:
    (files / "half").write_text("written")
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "there"),
    [(signal.SIGTERM, True), (signal.SIGHUP, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_an_export_that_is_ended_can_be_repeated(number: signal.Signals, there: bool, tmp_path: Path) -> None:
    """What a killed one has left is no reason to refuse, and is deleted."""
    target = tmp_path / "out" / "model"
    if there:
        target.mkdir(parents=True)
    assert (
        subprocess.run(
            [sys.executable, "-c", ENDS_WHILE_IT_WRITES, str(target), str(int(number))], check=False
        ).returncode
        != 0
    )
    killed = number == signal.SIGKILL
    assert any(path.name == "half" for path in (tmp_path / "out").rglob("*")) == killed
    require_empty(target)
    with _whole(target) as files:
        (files / "whole").write_text("")
    assert {path.name for path in (tmp_path / "out").rglob("*")} == {"model", "whole"}


def test_two_exports_do_not_fill_one_directory_and_none_a_link_to_nothing(tmp_path: Path) -> None:
    with (
        _whole(tmp_path),
        pytest.raises(ConfigError, match="another export writes there, or was killed"),
        _whole(tmp_path),
    ):
        pass
    assert not any(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"link is a link to \S+/gone, which does not exist"):
        require_empty(tmp_path / "link")


def test_an_adapter_is_imported_with_a_warning_of_what_no_server_checks_or_trains(
    data: Path, base: Path, text_base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For a base that is only in part on this machine, as an interrupted download leaves it, or who copied all that is
    JSON."""
    part = Path(shutil.copytree(base, tmp_path / "part"))
    (part / "model.safetensors").unlink()
    (part / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    write_peft(random_adapter(text_base, rank=257), text_base.layout, "x", tmp_path / "adapter")
    done = tinsmith_here(
        "import", str(tmp_path / "adapter"), "a", "--base-model", f"text={part}", "--data-dir", str(data)
    )
    assert (done.returncode, len(done.stdout.split())) == (0, 2), done.stderr
    assert f"the weights of {part} are not on this machine" in caplog.text
    assert "the adapter is of rank 257: only a server with --max-lora-rank 257 or more trains it further" in caplog.text
