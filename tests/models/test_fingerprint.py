"""Which weights a base model has: the same wherever and however they are stored, another for any other weights."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bases import load
from tinsmith.errors import ConfigError
from tinsmith.models.files import holds_weights, local_directory
from tinsmith.models.fingerprint import compute_fingerprint, fingerprint_of


@pytest.fixture
def model(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model of its own."""
    return Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))


def test_it_is_that_of_the_files_however_they_are_served_named_and_cut(model: Path, tmp_path: Path) -> None:
    expected = fingerprint_of(model)
    assert [load(model, dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")] == [expected] * 2
    tensors = load_file(model / "model.safetensors")
    cut = tmp_path / "cut"
    cut.mkdir()
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(reversed(tensors))}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == part}, cut / part)
    (cut / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert fingerprint_of(cut) == expected


def test_its_value_stays_from_version_to_version(tmp_path: Path) -> None:
    """Saved checkpoints name it. `b` takes two blocks of 16 MiB, the second one shorter."""
    tensors = {"b": torch.arange(5 * 2**20, dtype=torch.int32), "a": torch.tensor([[1.5]], dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    content = tensors["b"].numpy().tobytes()
    expected = hashlib.sha256()
    whole = {'["a", "BF16", [1, 1]]': [b"\xc0\x3f"], '["b", "I32", [5242880]]': [content[: 2**24], content[2**24 :]]}
    for label, blocks in whole.items():
        expected.update(json.dumps([label, *(hashlib.sha256(block).hexdigest() for block in blocks)]).encode())
    assert fingerprint_of(tmp_path) == expected.hexdigest()


def test_any_other_weights_have_another(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    tensor = tensors.pop(name)
    found = {fingerprint_of(model)}
    for changed, other in (
        (name, tensor + 1),
        ("other", tensor),
        (name, tensor.view(torch.int32)),
        (name, tensor.reshape(-1)),
    ):
        save_file(tensors | {changed: other}, model / "model.safetensors")
        found.add(fingerprint_of(model))
    assert len(found) == 5


def test_weights_without_safetensors_have_one_too(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    first = fingerprint_of(tmp_path)
    (tmp_path / "training_args.bin").touch()
    assert fingerprint_of(tmp_path) == first
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert fingerprint_of(tmp_path) != first


def test_what_is_missing_or_damaged_is_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut \(100 bytes, .*; download it again"):
        fingerprint_of(model)
    (model / "model.safetensors").unlink()
    assert not holds_weights(model)
    assert local_directory("nobody/nothing") is None
    for source, reason in ((str(model), "holds no weights"), ("nobody/nothing", "nobody/nothing are not in the cache")):
        with pytest.raises(ConfigError, match=reason):
            compute_fingerprint(source).result(60)
    (model / "pytorch_model.bin").symlink_to(model / "gone")  # as in a cache of the Hub that was cleaned by hand
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is missing or damaged .*; download the model again"):
        compute_fingerprint(str(model)).result(60)
