"""External weights: for whom they are encrypted, and what is left of a save that fails."""

import json
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyrage
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import load_file

from tests.bases import load
from tinsmith.config import TrainingConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.files import WRITING_PREFIX
from tinsmith.training.backend import LocalBackend
from tinsmith.worker.exports import encrypt, parse_recipients, write_external

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def names(directory: Path) -> list[str]:
    """What lies in a directory."""
    return sorted(path.name for path in directory.iterdir())


def test_an_ssh_key_decrypts_what_was_encrypted_for_it(text_base: BaseModel, tmp_path: Path) -> None:
    backend = LocalBackend(text_base, TrainingConfig())
    backend.create_model("m", LoraShape(4, seed=1))
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    state = backend.copy_state("m", optimizer=False)
    assert (state.about.base_model, state.about.shape.rank) == ("tiny", 4)
    layout = backend.base.layout
    write_external(state, layout, tmp_path / "plain", [])
    write_external(state, layout, tmp_path / "secret", parse_recipients([public]))
    assert (names(tmp_path / "plain"), names(tmp_path / "secret")) == (FILES, [f"{name}.age" for name in FILES])
    identity = pyrage.ssh.Identity.from_buffer(
        private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    )
    for name in FILES:
        decrypted = pyrage.decrypt((tmp_path / "secret" / f"{name}.age").read_bytes(), [identity])
        assert decrypted == (tmp_path / "plain" / name).read_bytes()
    assert names(tmp_path) == ["plain", "secret"]


@pytest.mark.parametrize("text", ["", "nobody", "age1nobody", "ssh-ed25519 nobody", "-----BEGIN", "AGE-SECRET-KEY-1"])
def test_what_is_no_key_is_refused_by_name_and_a_secret_key_is_not_repeated(text: str) -> None:
    good, secret = str(pyrage.x25519.Identity.generate().to_public()), str(pyrage.x25519.Identity.generate())
    with pytest.raises(
        UserError, match=rf"age_encryption_recipients\.1: {text!r} is no age1\.\.\. key and no SSH public key"
    ):
        parse_recipients([good, text])
    with pytest.raises(UserError) as refused:
        parse_recipients([secret])
    assert (secret[:20] in str(refused.value), secret[20:30] in str(refused.value)) == (True, False)


def test_other_threads_run_while_a_large_file_is_encrypted(tmp_path: Path) -> None:
    """As the one that sends heartbeats must: Python runs between the blocks that are read, and there it lets others
    have their turn."""
    key, plain, sizes = pyrage.x25519.Identity.generate(), bytes(4 * 2**20), list[int]()

    class Read(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            sizes.append(len(found))
            return found

    source: Any = SimpleNamespace(open=lambda *_: Read(plain))
    encrypt(source, tmp_path / "age", [key.to_public()])
    assert (sum(sizes), max(sizes) <= 2**20) == (4 * 2**20, True)  # a millisecond of work
    assert pyrage.decrypt((tmp_path / "age").read_bytes(), [key]) == plain


@pytest.mark.parametrize("rank", [0, 4])
def test_a_save_changes_nothing_that_other_threads_compute_with(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Torch's default dtype is that of all threads: after two exports side by side, adapters were made in bfloat16.

    Nor does it matter that the base's generation settings contradict each other, as Vicuna's do.
    """
    source = tmp_path / "base"
    shutil.copytree(family_dir("llama"), source)
    configured = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(configured | {"dtype": "bfloat16"}))
    (source / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    backend = LocalBackend(load(source), TrainingConfig())
    backend.create_model("m", LoraShape(rank, seed=1))
    changed: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", changed.append)
    write_external(backend.copy_state("m", optimizer=False), backend.base.layout, tmp_path / "written", [])
    assert changed == []
    assert ("adapter_model.safetensors" if rank else "model.safetensors") in names(tmp_path / "written")
    assert not [name for name in names(tmp_path / "written") if name.startswith(WRITING_PREFIX)]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss"])
def test_untrained_full_weights_of_experts_are_written_as_the_base(
    family: str, family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel], tmp_path: Path
) -> None:
    """Bit for bit, with routers, which no model trains."""
    backend = LocalBackend(family_base(family), TrainingConfig())
    backend.create_model("m", LoraShape(0, seed=1))
    write_external(backend.copy_state("m", optimizer=False), backend.base.layout, tmp_path, [])
    before, after = (load_file(place / "model.safetensors") for place in (family_dir(family), tmp_path))
    assert before.keys() == after.keys()
    assert any(name.endswith((".mlp.gate.weight", ".mlp.router.weight")) for name in before)
    assert all(torch.equal(own, after[name]) for name, own in before.items())
