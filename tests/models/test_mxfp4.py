"""Experts in MXFP4 on disk: read as transformers reads them, and written as they are computed.

Invariant: Weights in MXFP4 are read with the bits that transformers gives them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from tests.bases import datum, load, random_adapter, random_tokens, renderer, shifted, transformers_model
from tests.models.test_experts import stack_of
from tests.training.test_against_peft import twin_logprobs
from tests.training.test_backend import compute
from tinsmith.config import TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.families import family_of, load_network, packed_parameters, read_config
from tinsmith.models.files import safetensors_files
from tinsmith.models.layout import read_layout
from tinsmith.models.mxfp4 import Packed, dequantized, stored_parameters
from tinsmith.models.quantized import FORMATS, QuantizedMatrices, quantize
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import LocalBackend
from tinsmith.training.peft_format import write_merged

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def pack_experts(source: Path, directory: Path) -> None:
    """A tiny GPT-OSS as it is published: experts of random bits in MXFP4, all else in bfloat16, in two files."""
    shutil.copytree(source, directory)
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith(EXPERTS):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
            files[0][f"{name}_blocks"] = blocks.to(torch.uint8)
            scales = torch.randint(118, 126, blocks.shape[:3], generator=generator)
            files[1][f"{name}_scales"] = scales.to(torch.uint8)
        else:
            files[len(name) % 2][name] = tensor.bfloat16()
    (directory / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number, tensors in enumerate(files):
        save_file(tensors, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    del config["dtype"]  # as published
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def packed(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "model"
    pack_experts(family_dir("gpt_oss"), directory)
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_parameters_have_the_bits_that_transformers_gives_them(packed: Path, dtype: str) -> None:
    options: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": dtype}
    theirs = dict(AutoModelForCausalLM.from_pretrained(packed, **options).named_parameters())
    base = load(packed, device="cpu", dtype=dtype)
    ours = dict(base.network.named_parameters())
    for name, parameter in theirs.items():
        own = ours[name]
        assert own.dtype == getattr(torch, dtype)
        assert torch.equal(own, parameter.to(own.dtype)), name  # transformers 5.17 has experts in bfloat16 always
    assert base.eos_token_ids() == load(packed.parent / "model", device="cpu").eos_token_ids()


def test_every_number_of_four_bits_is_read(packed: Path) -> None:
    """Two of a byte, the first in its lower half; all of a block times its power of two."""
    blocks = torch.tensor([[0x10 * (2 * n + 1) + 2 * n for n in range(8)] * 2], dtype=torch.uint8).view(1, 1, 1, 16)
    (found,) = dequantized(Packed(blocks, torch.tensor([[[126]]], dtype=torch.uint8)), torch.float32).unbind()
    positive = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    expected = [*positive, *(-value for value in positive)] * 2
    assert found.tolist() == [[value] for value in expected]
    stored = stored_parameters(safetensors_files(packed))
    assert {name.rpartition(".")[2] for name in stored} == {"gate_up_proj", "down_proj"}
    assert all(own.shape == tuple(dequantized(own.read(), torch.float32).shape) for own in stored.values())


def test_it_trains_as_transformers_computes_it(packed: Path) -> None:
    base = load(packed)
    rendered = renderer(base).render([random_tokens(0, 50)])
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("m", LoraShape(4, seed=0))
    (result,) = compute(backend, [datum("m", rendered)])
    twin = transformers_model(packed, quantization_config=Mxfp4Config(dequantize=True)).float()
    expected = twin_logprobs(twin, base, rendered, shifted(rendered)).detach().numpy()
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_a_merged_model_is_in_bfloat16_and_needs_no_more(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = load(packed, device="cpu")
    write_merged(random_adapter(base, rank=4), base.layout, str(packed), tmp_path)
    assert not caplog.messages
    assert not hasattr(read_config(str(tmp_path)), "quantization_config")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors.keys() == dict(base.network.named_parameters()).keys()
    assert read_layout(str(tmp_path)).targets == base.layout.targets
    assert load(tmp_path).decoder is not None


def test_files_that_lack_scales_are_refused(packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "model"))
    tensors = load_file(directory / "model-1.safetensors")
    lost = next(name for name in tensors if name.endswith("_scales"))
    del tensors[lost]
    save_file(tensors, directory / "model-1.safetensors", metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"its weights lack {lost}; download them again"):
        load(directory)


def test_parameters_that_stay_apart_take_no_memory(packed: Path, family_dir: Callable[[str], Path]) -> None:
    """The experts of the 120b take 240 GB in bfloat16."""
    source = str(packed)
    stored = packed_parameters(source)
    assert len(stored) == 2 * len(load(packed, device="cpu").layout.experts)
    network = load_network(source, family_of(source, read_config(source)), torch.bfloat16, stored)
    parameters = dict(network.named_parameters())
    for name, own in stored.items():
        assert tuple(parameters[name].shape) == own.shape
        assert parameters[name].untyped_storage().nbytes() == 2
    assert packed_parameters(str(family_dir("gpt_oss"))) == {}


def test_what_is_packed_and_belongs_to_no_experts_is_refused(packed: Path, tmp_path: Path) -> None:
    """It would be left without numbers."""
    directory = Path(shutil.copytree(packed, tmp_path / "model"))
    file = directory / "model-1.safetensors"
    other = {"model.other_blocks": torch.zeros(1, 32, 2, 16), "model.other_scales": torch.zeros(1, 32, 2)}
    other = {name: tensor.to(torch.uint8) for name, tensor in other.items()}
    save_file(load_file(file) | other, file, metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(other, file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="other is in MXFP4 and none of its experts'; omit --expert-dtype"):
        load(directory, expert_dtype="fp8")


def test_experts_of_other_formats_are_made_of_what_the_files_hold(packed: Path) -> None:
    """As of the same weights in bfloat16 files, whose layers are all in memory before."""
    base, whole = load(packed, expert_dtype="fp8", dtype="bfloat16"), load(packed, dtype="bfloat16")
    for layer in range(len(base.layout.layers)):
        for own, matrices in zip(stack_of(base, layer).matrices, stack_of(whole, layer).matrices, strict=True):
            assert isinstance(own, QuantizedMatrices)
            assert isinstance(matrices, torch.Tensor)
            codes, scales = quantize(matrices, FORMATS["fp8"])
            assert torch.equal(own.codes, codes)
            assert torch.equal(own.scales, scales)


def test_experts_that_stay_in_mxfp4_have_the_numbers_of_the_files(packed: Path) -> None:
    base, whole = load(packed, expert_dtype="mxfp4", dtype="bfloat16"), load(packed, dtype="bfloat16")
    for layer in range(len(base.layout.layers)):
        held, given = stack_of(base, layer), stack_of(whole, layer)
        for own, matrices in zip(held.matrices, given.matrices, strict=True):
            assert isinstance(own, QuantizedMatrices)
            assert isinstance(matrices, torch.Tensor)
            assert own.codes.nbytes * 4 == matrices.nbytes
            assert torch.equal(own.copied(), matrices)
