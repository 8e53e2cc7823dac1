"""What is wrong with the files of a model is said in a line with file and remedy, before anything slow is imported.

Invariant: Every command reports what cannot work in one line, before it loads anything slow; the same holds for damaged
or missing model files. Also: `tests/test_cli.py`, `tests/test_config.py`, `tests/commands/test_ping.py`,
`tests/rl/test_reach.py`, `tests/sampling/vllm/test_options.py`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.preloaded import REAL_PYTHON
from tests.running import tinsmith_here
from tinsmith.models.files import local_directory, problems

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
LFS = "is a pointer of Git LFS and not the file itself; run `git lfs pull` in"
NO_TOKENIZER = "holds no tokenizer"
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model that takes images, to be damaged."""
    return Path(shutil.copytree(family_dir("qwen3_vl"), tmp_path / "model"))


def cut(model: Path, name: str, size: int) -> None:
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[:size] if size > 0 else content + bytes(-size))


def write(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)


def change(directory: Path, /, name: str, **values: Any) -> None:
    (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | values))


def remove(model: Path, *names: str) -> None:
    for name in names:
        (model / name).unlink(missing_ok=True)


def rename_a_tensor(model: Path, name: str) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors[name] = tensors.pop(next(iter(tensors)))
    save_file(tensors, model / WEIGHTS)


def header(model: Path, *places: list[int], **entry: Any) -> None:
    """Weights of 16 bytes whose header has tensors at these places, and says something else of each."""
    given = {
        str(number): {"dtype": "F32", "shape": [2], "data_offsets": place} | entry
        for number, place in enumerate(places)
    }
    text = json.dumps(given).encode()
    write(model, WEIGHTS, len(text).to_bytes(8, "little") + text + bytes(16))


def instead(model: Path, name: str, make: Callable[[Path], Any]) -> None:
    """Something else in place of a file."""
    remove(model, name)
    make(model / name)


def shard(model: Path, lost: str = "", index: str = "", **places: str) -> None:
    """Two files, of which one may be lost, and an index, which says what it should but for `places`."""
    tensors = load_file(model / WEIGHTS)
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, model / file)
    listed = {name: file for file, part in halves.items() for name in part}
    (model / "model.safetensors.index.json").write_text(index or json.dumps({"weight_map": listed | places}))
    remove(model, WEIGHTS, *([lost] if lost else []))


def pickled(model: Path, content: bytes) -> None:
    remove(model, WEIGHTS)
    write(model, "pytorch_model.bin", content)


TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")

NO_JINJA = "is damaged (its chat template is no Jinja: "

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut": (partial(cut, name=WEIGHTS, size=50000), "model.safetensors is cut ("),
    "weights too long": (partial(cut, name=WEIGHTS, size=-9), "model.safetensors is damaged ("),
    "weights a pointer": (partial(write, name=WEIGHTS, content=POINTER), f"model.safetensors {LFS}"),
    "weights a pipe": (partial(instead, name=WEIGHTS, make=os.mkfifo), "download them, or name the directory"),
    "weights of another model": (
        partial(change, name="config.json", text_config={"vocab_size": 2048, "hidden_size": 128}),
        (
            "model.safetensors is of another model (its embedding is [2048, 64], and config.json has vocab_size=2048 "
            "and hidden_size=128)"
        ),
    ),
    "sizes that do not fit": (
        lambda model: header(model, [0, 8], [8, 16], shape=[3]),
        "0 has 8 bytes for F32 of shape [3]",
    ),
    "a precision that is none": (
        lambda model: header(model, [0, 8], dtype="F3"),
        "is damaged (its header cannot be read: 'F3')",
    ),
    "tensors that overlap": (
        lambda model: header(model, [0, 8], [4, 12]),
        "1 begins at 4, where the tensor before it ends at 8",
    ),
    "bytes of no tensor": (lambda model: header(model, [8, 16]), "0 begins at 8, where the tensor before it ends at 0"),
    "half a byte": (lambda model: header(model, [0, 8], [8, 16], dtype="F4", shape=[16]), "quantized weights (0"),
    "AWQ": (
        partial(change, name="config.json", quantization_config={"quant_method": "awq"}),
        "quantized (awq) and cannot be trained",
    ),
    "MXFP4 of other experts": (
        partial(change, name="config.json", quantization_config={"quant_method": "mxfp4"}),
        "quantized (mxfp4) and cannot be trained",
    ),
    "GPTQ of old": (
        partial(rename_a_tensor, name="layers.0.q_proj.qweight"),
        "quantized weights (layers.0.q_proj.qweight)",
    ),
    "no weights": (lambda model: remove(model, WEIGHTS), "download them, or name the directory"),
    "only GGUF": (
        lambda model: (model / WEIGHTS).rename(model / "model-q4.gguf"),
        "only model-q4.gguf, which cannot be trained; name the model that it was made of",
    ),
    "pickled pointer": (partial(pickled, content=POINTER), f"pytorch_model.bin {LFS}"),
    "a part missing": (partial(shard, lost="two.safetensors"), "two.safetensors cannot be read (No such file"),
    "an index of other files": (
        partial(shard, strange="one.safetensors"),
        "one.safetensors does not hold strange, though",
    ),
    "an index without a map": (partial(shard, index="{}"), "no weight_map"),
    "no heads": (
        partial(change, name="config.json", text_config={"num_attention_heads": 0}),
        "num_attention_heads=0 must be a whole",
    ),
    "no room": (
        partial(change, name="config.json", text_config={"max_position_embeddings": 0}),
        "max_position_embeddings=0 must be a",
    ),
    "experts": (
        partial(change, name="config.json", num_experts=8),
        "is a mixture of experts (num_experts=8), which LoRA does not reach",
    ),
    "no such placeholder": (
        partial(change, name="config.json", image_token_id=99999),
        "image_token_id=99999 is no token of the model",
    ),
    "configuration cut": (partial(cut, name="config.json", size=50), "config.json is damaged (it is no JSON"),
    "configuration of nothing": (partial(write, name="config.json", content=b"{}"), "it has no model_type"),
    "configuration too deep": (
        partial(write, name="config.json", content=b"[" * 10**6),
        "config.json is damaged (it is no JSON",
    ),
    "no tokenizer": (lambda model: remove(model, *TOKENIZER[:3]), NO_TOKENIZER),
    "tokenizer a pointer": (partial(write, name="tokenizer.json", content=POINTER), f"tokenizer.json {LFS}"),
    "tokenizer empty": (
        partial(change, name="tokenizer.json", model={}),
        "tokenizer.json is damaged (it has no vocabulary)",
    ),
    "larger tokenizer": (
        partial(change, name="tokenizer.json", model={"vocab": {"a": 99999}}),
        "(its tokens go up to 99999, and vocab_size",
    ),
    "settings of no text": (
        partial(write, name="tokenizer_config.json", content=b"\xff\xfe"),
        "tokenizer_config.json is damaged",
    ),
    "an end of text": (
        partial(change, name="generation_config.json", eos_token_id="</s>"),
        "(eos_token_id='</s>' is no number of a token)",
    ),
    "template a directory": (
        partial(instead, name="chat_template.jinja", make=Path.mkdir),
        "chat_template.jinja is no file",
    ),
    "template cut": (
        partial(write, name="chat_template.jinja", content=b"{% if a %}\n{{ b }"),
        f"{NO_JINJA}line 2: unexpected '}}')",
    ),
    "template of no text": (
        partial(write, name="chat_template.jinja", content=b"\xff"),
        f"{NO_JINJA}'utf-8' codec can't",
    ),
    "template a number": (partial(change, name="tokenizer_config.json", chat_template=3), f"{NO_JINJA}it is 3)"),
    "template of several": (
        partial(change, name="tokenizer_config.json", chat_template=[{"name": "default", "template": "{{"}]),
        f"{NO_JINJA}line 1: unexpected 'end of template')",
    ),
    "no processor": (lambda model: remove(model, "preprocessor_config.json"), "holds no image processor"),
    "another processor": (partial(change, name="preprocessor_config.json", patch_size=14), "(patch_size=14, and "),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_cannot_be_used_is_one_line_with_file_and_remedy(kind: str, model: Path) -> None:
    damage, message = DAMAGES[kind]
    damage(model)
    (found,) = problems(str(model), whole=True)
    assert all(part in found for part in (message, str(model), "; "))
    assert "\n" not in found


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl", "qwen3_5"])
def test_nothing_is_wrong_with_a_model_however_it_is_stored(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family_dir(family), tmp_path / "model"))
    assert list(problems(str(model), whole=True)) == []
    tokens = json.loads((model / "tokenizer.json").read_text())
    # One of Gemma 3, which its text models have no row for
    for token, number in (("<image_soft_token>", 2**18), ("of text", "1")):
        tokens["model"]["vocab"][token] = number
    tokens["added_tokens"].append({"id": 2**18, "content": "<image_soft_token>"})
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    assert list(problems(str(model), whole=True)) == []
    shard(model)
    assert list(problems(str(model), whole=True)) == []
    pickled(model, b"PK")
    assert list(problems(str(model), whole=True)) == []


def test_what_says_nothing_is_not_damaged(model: Path) -> None:
    """Nor is a template that transformers alone can read, by its tag for what a model has said."""
    write(
        model,
        "chat_template.jinja",
        b"{% for m in a %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}",
    )
    change(
        model,
        name="tokenizer_config.json",
        chat_template=[{"name": "a", "template": ""}, {"name": "b", "template": "{{ b }}"}],
    )
    write(model, "generation_config.json", b"")
    change(model, name="preprocessor_config.json", patch_size={"height": 16, "width": 16})
    assert list(problems(str(model), whole=True)) == []


@pytest.mark.parametrize("lost", ["two.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_download_that_was_interrupted_goes_on(
    lost: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot in the Hub's cache has links to blobs; one may be without its blob, or not be there."""
    shard(model)
    (snapshot := tmp_path / "models--me--m" / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "models--me--m" / "refs").mkdir()
    write(tmp_path / "models--me--m" / "refs", "main", b"1")
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_directory("me/m") == snapshot
    remove(model, lost)
    assert list(problems("me/m", whole=True)) == []
    remove(snapshot, lost)
    assert list(problems("me/m", whole=True)) == []
    if "index" not in lost:
        cut(model, "one.safetensors", 500)
        (found,) = problems("me/m", whole=True)
        assert f"{snapshot}/one.safetensors is" in found


def test_files_of_json_or_a_configuration_alone_are_enough_to_plan(model: Path) -> None:
    """Nothing is said of what is elsewhere."""
    shard(model)
    remove(model, "one.safetensors", "two.safetensors")
    assert list(problems(str(model), whole=False)) == []
    remove(model, *(file.name for file in model.iterdir() if file.name != "config.json"))
    assert list(problems(str(model), whole=False)) == []
    assert len(list(problems(str(model), whole=True))) == 3
    assert list(problems("nobody/nothing", whole=True)) == []


@pytest.mark.parametrize(
    "command", ["serve --base-model MODEL", "plan MODEL", "import DIR name --base-model MODEL --data-dir DIR"]
)
def test_every_command_says_it_before_torch_is_imported(command: str, model: Path, tmp_path: Path) -> None:
    cut(model, WEIGHTS, 50000)
    words = [{"MODEL": str(model), "DIR": str(tmp_path)}.get(word, word) for word in command.split()]
    program = f"""
import sys
from tinsmith.cli import main
sys.argv = {["tinsmith", *words]!r}
try:
    main()
finally:
    print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([REAL_PYTHON, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert done.stderr.startswith(f"tinsmith: {model}/model.safetensors is cut (50,000 bytes")
    assert done.stderr.count("\n") == 1


def test_doctor_says_all_of_it(model: Path, tmp_path: Path) -> None:
    cut(model, WEIGHTS, 50000)
    remove(model, *TOKENIZER)
    done = tinsmith_here("doctor", "--base-model", f"m={model}", "--data-dir", str(tmp_path / "data"), "--port", "0")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "is cut (50,000 bytes" in said
    assert NO_TOKENIZER in said
    assert said.endswith("missing: m")
