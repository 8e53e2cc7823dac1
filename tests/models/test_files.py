"""What is wrong with the files of a model is said in a line with file and remedy, before anything slow is imported.

Invariant: Every command reports what cannot work in one line, before it loads anything slow; the same holds for damaged or missing model
files.
Also: `tests/test_cli.py`, `tests/test_config.py`, `tests/commands/test_status.py`, `tests/rl/test_reach.py`,
`tests/sampling/vllm/test_options.py`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
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


@pytest.fixture
def model(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model that takes pictures, to be damaged."""
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
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors.pop(next(iter(tensors)))
    save_file(tensors, model / "model.safetensors")


def header(model: Path, **entry: Any) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()
    write(model, "model.safetensors", len(text).to_bytes(8, "little") + text + bytes(8))


def tensors_at(model: Path, offsets: list[list[int]]) -> None:
    names = {str(number): {"dtype": "F32", "shape": [2], "data_offsets": place} for number, place in enumerate(offsets)}
    text = json.dumps(names).encode()
    write(model, "model.safetensors", len(text).to_bytes(8, "little") + text + bytes(16))


def instead(model: Path, name: str, make: Callable[[Path], Any]) -> None:
    """Something else in place of a file."""
    remove(model, name)
    make(model / name)


def only_sentencepiece(model: Path, name: str) -> None:
    remove(model, *TOKENIZER)
    write(model, name, b"pieces")


def shard(model: Path, lost: str = "", index: str = "", **places: str) -> None:
    """Two files, of which one may be lost, and an index, which says what it should but for `places`."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, model / file)
    listed = {name: file for file, part in halves.items() for name in part}
    (model / "model.safetensors.index.json").write_text(index or json.dumps({"weight_map": listed | places}))
    remove(model, "model.safetensors", *([lost] if lost else []))


def pickled(model: Path, content: bytes) -> None:
    remove(model, "model.safetensors")
    write(model, "pytorch_model.bin", content)


def processor_of_text(model: Path) -> None:
    remove(model, "preprocessor_config.json")
    write(model, "processor_config.json", b'{"image_processor": "x"}')


def template_for_tools(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    write(model, "additional_chat_templates/tool.jinja", b"{% for")


def gguf(model: Path) -> None:
    remove(model, "model.safetensors")
    write(model, "model-q4.gguf", b"GGUF")


TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut": (partial(cut, name="model.safetensors", size=50000), "model.safetensors is cut ("),
    "weights cut in the header": (partial(cut, name="model.safetensors", size=100), "model.safetensors is damaged or cut ("),
    "weights too long": (partial(cut, name="model.safetensors", size=-9), "model.safetensors is damaged ("),
    "weights empty": (partial(write, name="model.safetensors", content=b""), "model.safetensors is damaged or cut (0 bytes"),
    "weights of zeros": (partial(write, name="model.safetensors", content=bytes(99)), "model.safetensors is damaged (its header cannot"),
    "weights a pointer": (partial(write, name="model.safetensors", content=POINTER), f"model.safetensors {LFS}"),
    "sizes that do not fit": (partial(header, shape=[3]), "a has 8 bytes for F32 of shape [3]"),
    "a precision that is none": (partial(header, dtype="F3"), "model.safetensors is damaged (its header cannot be read: 'F3')"),
    "offsets of text": (partial(header, data_offsets="ab"), "model.safetensors is damaged (its header cannot be read"),
    "weights of another model": (
        partial(change, name="config.json", text_config={"vocab_size": 2048, "hidden_size": 128}),
        "model.safetensors is of another model (its embedding is [2048, 64], and config.json has vocab_size=2048 and hidden_size=128)",
    ),
    "no weights": (
        lambda model: remove(model, "model.safetensors"),
        "download them, or name the directory",
    ),
    "only GGUF": (gguf, "only model-q4.gguf, which cannot be trained; name the model that it was made of"),
    "pickled pointer": (partial(pickled, content=POINTER), f"pytorch_model.bin {LFS}"),
    "a part missing": (partial(shard, lost="two.safetensors"), "two.safetensors cannot be read (No such file"),
    "an index of other files": (
        partial(shard, strange="one.safetensors"),
        "one.safetensors does not hold strange, though",
    ),
    "an index without a map": (partial(shard, index="{}"), "no weight_map"),
    "tensors that overlap": (partial(tensors_at, offsets=[[0, 8], [4, 12]]), "1 begins at 4, where the tensor before it ends at 8"),
    "bytes of no tensor": (partial(tensors_at, offsets=[[8, 16]]), "0 begins at 8, where the tensor before it ends at 0"),
    "weights a pipe": (partial(instead, name="model.safetensors", make=os.mkfifo), "download them, or name the directory"),
    "half a byte": (partial(header, dtype="F4", shape=[16]), "quantized weights (a)"),
    "no heads": (partial(change, name="config.json", text_config={"num_attention_heads": 0}), "num_attention_heads=0 must be a whole"),
    "AWQ": (partial(change, name="config.json", quantization_config={"quant_method": "awq"}), "quantized (awq) and cannot be trained"),
    "GPTQ of old": (partial(rename_a_tensor, name="layers.0.q_proj.qweight"), "quantized weights (layers.0.q_proj.qweight)"),
    "experts": (partial(change, name="config.json", num_experts=8), "is a mixture of experts (num_experts=8), which LoRA does not reach"),
    "configuration cut": (partial(cut, name="config.json", size=50), "config.json is damaged (it is no JSON"),
    "configuration a list": (partial(write, name="config.json", content=b"[]"), "config.json is damaged (it holds no object"),
    "configuration of nothing": (partial(write, name="config.json", content=b"{}"), "it has no model_type"),
    "configuration too deep": (partial(write, name="config.json", content=b"[" * 10**6), "config.json is damaged (it is no JSON"),
    "no tokenizer": (lambda model: remove(model, *TOKENIZER), NO_TOKENIZER),
    "only its configuration": (lambda model: remove(model, *TOKENIZER[:3]), NO_TOKENIZER),
    "tokenizer cut": (partial(cut, name="tokenizer.json", size=500), "tokenizer.json is damaged (it is no JSON"),
    "tokenizer a pointer": (partial(write, name="tokenizer.json", content=POINTER), f"tokenizer.json {LFS}"),
    "tokenizer empty": (partial(change, name="tokenizer.json", model={}), "tokenizer.json is damaged (it has no vocabulary)"),
    "tokenizer of a larger model": (
        partial(change, name="tokenizer.json", model={"vocab": {"a": 99999}}),
        "tokenizer.json is of another model (its tokens go up to 99999, and vocab_size in config.json is 2048)",
    ),
    "token of a list": (partial(change, name="tokenizer.json", model={"vocab": [["a", 0.0]] * 2049}), "its tokens go up to 2048"),
    "tokenizer's settings": (partial(write, name="tokenizer_config.json", content=b"\xff\xfe"), "tokenizer_config.json is damaged"),
    "generation settings": (partial(write, name="generation_config.json", content=b"{"), "generation_config.json is damaged"),
    "template a pointer": (partial(write, name="chat_template.jinja", content=POINTER), f"chat_template.jinja {LFS}"),
    "template a directory": (partial(instead, name="chat_template.jinja", make=Path.mkdir), "chat_template.jinja is no file"),
    "template a pipe": (partial(instead, name="chat_template.jinja", make=os.mkfifo), "chat_template.jinja is no file"),
    "template of no Jinja": (
        partial(write, name="chat_template.jinja", content=b"{% if a %}\n{{ b }"),
        "chat_template.jinja is damaged (its chat template is no Jinja: line 2: unexpected '}')",
    ),
    "template of no text": (
        partial(write, name="chat_template.jinja", content=b"\xff"),
        "chat_template.jinja is damaged (its chat template is no Jinja: 'utf-8' codec can't",
    ),
    "template too deep": (
        partial(write, name="chat_template.jinja", content=b"{{" + b"(" * 10**5),
        "chat_template.jinja is damaged (its chat template is no Jinja: ",
    ),
    "template in the settings": (
        partial(change, name="tokenizer_config.json", chat_template="{% nothing %}"),
        "tokenizer_config.json is damaged (its chat template is no Jinja: line 1: Encountered unknown tag 'nothing'.)",
    ),
    "template a number": (
        partial(change, name="tokenizer_config.json", chat_template=3),
        "tokenizer_config.json is damaged (its chat template is no Jinja: it is 3)",
    ),
    "template of several": (
        partial(change, name="tokenizer_config.json", chat_template=[{"name": "default", "template": "{{"}]),
        "tokenizer_config.json is damaged (its chat template is no Jinja: line 1: unexpected 'end of template')",
    ),
    "template without a text": (
        partial(change, name="tokenizer_config.json", chat_template=[{"name": "default"}]),
        "tokenizer_config.json is damaged (its chat template is no Jinja: it is None)",
    ),
    "template of a processor": (
        partial(write, name="chat_template.json", content=b'{"chat_template": {"default": "{%"}}'),
        "chat_template.json is damaged (its chat template is no Jinja: ",
    ),
    "template for tools": (template_for_tools, "tool.jinja is damaged (its chat template is no Jinja: "),
    "a placeholder that is no token": (
        partial(change, name="config.json", image_token_id=99999),
        "config.json: image_token_id=99999 is no token of the model, whose vocab_size is 2048",
    ),
    "an end of text": (
        partial(change, name="generation_config.json", eos_token_id="</s>"),
        "generation_config.json is damaged (eos_token_id='</s>' is no number of a token)",
    ),
    "no room": (
        partial(change, name="config.json", text_config={"max_position_embeddings": 0}),
        "max_position_embeddings=0 must be a whole number above 0",
    ),
    "settings a pipe": (partial(instead, name="tokenizer_config.json", make=os.mkfifo), "tokenizer_config.json is no file"),
    **{
        f"only {name}": (partial(only_sentencepiece, name=name), "needs the package sentencepiece to be read: pip install sentencepiece")
        for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
    },
    "processor of text": (
        processor_of_text,
        "processor_config.json is damaged (image_processor='x' is no object)",
    ),
    "no processor": (lambda model: remove(model, "preprocessor_config.json"), "holds no image processor"),
    "processor of another model": (
        partial(change, name="preprocessor_config.json", patch_size=14),
        "(patch_size=14, and ",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_cannot_be_used_is_one_line_with_file_and_remedy(kind: str, model: Path) -> None:
    damage, message = DAMAGES[kind]
    if "sentencepiece" in message and find_spec("sentencepiece"):
        pytest.skip("sentencepiece is installed, which reads it")
    damage(model)
    (found,) = problems(str(model), whole=True)
    assert message in found
    assert str(model) in found
    assert "; " in found
    assert "\n" not in found


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llama"])
def test_nothing_is_wrong_with_a_model_however_it_is_stored(family: str, family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir(family), tmp_path / "model"))
    assert list(problems(str(model), whole=True)) == []
    tokens = json.loads((model / "tokenizer.json").read_text())
    for token, number in (("<image_soft_token>", 2**18), ("of text", "1")):  # one of Gemma 3, which its text models have no row for
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
    write(model, "chat_template.jinja", b"{% for m in a %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}")
    change(model, name="tokenizer_config.json", chat_template=[{"name": "a", "template": ""}, {"name": "b", "template": "{{ b }}"}])
    write(model, "generation_config.json", b"")
    change(model, name="preprocessor_config.json", patch_size={"height": 16, "width": 16})
    assert list(problems(str(model), whole=True)) == []


@pytest.mark.parametrize("lost", ["two.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_download_that_was_interrupted_goes_on(lost: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_files_of_json_alone_are_enough_to_plan(model: Path) -> None:
    shard(model)
    remove(model, "one.safetensors", "two.safetensors")
    assert list(problems(str(model), whole=False)) == []


def test_a_configuration_alone_is_enough_to_plan_and_nothing_is_said_of_what_is_elsewhere(model: Path) -> None:
    remove(model, *(file.name for file in model.iterdir() if file.name != "config.json"))
    assert list(problems(str(model), whole=False)) == []
    assert len(list(problems(str(model), whole=True))) == 3
    assert list(problems("nobody/nothing", whole=True)) == []


COMMANDS = {
    "serve": ["serve", "--base-model", "MODEL"],
    "plan": ["plan", "MODEL"],
    "import": ["import", "DIR", "name", "--base-model", "MODEL", "--data-dir", "DIR"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it_before_torch_is_imported(command: str, model: Path, tmp_path: Path) -> None:
    cut(model, "model.safetensors", 50000)
    arguments = [{"MODEL": str(model), "DIR": str(tmp_path)}.get(word, word) for word in COMMANDS[command]]
    program = f"""
import sys
from tinsmith.cli import main
sys.argv = ["tinsmith", *{arguments!r}]
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
    cut(model, "model.safetensors", 50000)
    remove(model, *TOKENIZER)
    done = tinsmith_here("doctor", "--base-model", f"m={model}", "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "is cut (50,000 bytes" in said
    assert NO_TOKENIZER in said
    assert said.endswith("missing: m")
