"""Adapters leave for PEFT and as downloads and come back; transformers and PEFT load them, and merged models, to the
same logprobs.

What the cookbook makes of downloads: tests/recipes.

Invariant: Transformers and PEFT load an exported checkpoint to the same logprobs, and it comes back; an export is
complete or absent. Also: `tests/commands/test_exchange.py`, `tests/acceptance/test_exchange.py`.

Invariant: What is wrong in the files of an adapter is named, and nothing in them computes for ever.
"""

import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.bases import (
    OTHER_EXPERTS,
    datum,
    image_chunks,
    load,
    random_adapter,
    random_tokens,
    renderer,
    shifted,
    transformers_model,
    write_family,
)
from tests.extent import families
from tests.training.test_against_peft import twin_logprobs
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, new_full_weights
from tinsmith.models.layout import read_layout
from tinsmith.models.lora import Adapter, adapter_of
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.peft_config import read_peft_config
from tinsmith.training.peft_format import read_peft, write_download, write_merged, write_peft

FAMILIES = ["llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
WITH_EXPERTS = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss", *OTHER_EXPERTS]
TEXT_ONLY = ("qwen3_moe", "gpt_oss")
Bases = Callable[[str], BaseModel]
Dirs = Callable[[str], Path]
RANK = 4
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_WEIGHTS = "model.safetensors"
FUSED = "layers.0.linear_attn.in_proj_qkv"
"""A fused layer, whose queries, keys and values have adapters of their own."""
MIXTURE = "layers.0.mlp.experts"
ROOT = f"base_model.model.model.{MIXTURE}"
KEY = f"base_model.model.model.language_model.{FUSED}.lora_%s.weight"


@pytest.fixture(scope="module")
def family_base(family_dir: Dirs) -> Bases:
    """Base models on the CPU, wherever the other tests compute: that is where files are made and merged."""
    return cache(lambda family: load(family_dir(family), device="cpu"))


def test_a_shape_is_refused_before_there_is_anything_of_its_size(
    family_base: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer's matrices of a large rank make an adapter of all layers, many times as large as the file."""
    base = family_base("qwen3")
    write_peft(random_adapter(base, rank=RANK), base.layout, "x", tmp_path)

    def refuse(shape: LoraShape) -> None:
        raise UserError(f"refused: {shape.rank}")

    def never(*_: object) -> Adapter:
        raise AssertionError

    monkeypatch.setattr("tinsmith.training.peft_format.new_adapter", never)
    with pytest.raises(UserError, match=f"refused: {RANK}"):
        read_peft(tmp_path, base.layout, None, refuse)


@pytest.fixture
def hybrid(family_base: Bases) -> BaseModel:
    """A small Qwen3.5."""
    return family_base("qwen3_5")


def example(base: BaseModel) -> RenderedInput:
    return renderer(base).render(image_chunks(base, 1, 10) if base.family.takes_images else [random_tokens(1, 12)])


@torch.no_grad()
def assert_alike(twin: Any, base: BaseModel, weights: Weights, bound: float = 1e-4) -> None:
    """The same log-probabilities."""
    rendered = example(base)
    backend = LocalBackend(base, TrainingConfig())
    backend.optimizers["a"] = ModelOptimizer(weights)
    result = backend.run_pass([datum("a", rendered)], backward=False).results[0]
    assert result is not None
    theirs = twin_logprobs(twin.eval(), base, rendered, shifted(rendered)).numpy()
    np.testing.assert_allclose(result.logprobs, theirs, atol=bound)


def assert_same(one: Adapter, other: Adapter) -> None:
    """Bit for bit, in the same order."""
    assert (one.shape.rank, list(one.masters)) == (other.shape.rank, list(other.masters))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def in_dtype(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of an adapter folder."""
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def set_option(directory: Path, file: str = CONFIG, /, **options: Any) -> None:
    """Change a configuration."""
    (directory / file).write_text(json.dumps(json.loads((directory / file).read_text()) | options))


def peft_saves(source: Path, directory: Path, saving: dict[str, bool] | None = None, /, **options: Any) -> Any:
    """Let PEFT make a random adapter of the base and save it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT has thoughts of its own about adapters of a convolution
        twin: Any = get_peft_model(transformers_model(source), LoraConfig(init_lora_weights=False, **options))
        twin.save_pretrained(directory, **saving or {})
    return twin


@pytest.mark.parametrize("family", families([*FAMILIES, *WITH_EXPERTS]))
def test_peft_loads_an_adapter_to_the_same_logprobs(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str
) -> None:
    """It comes from the file of a checkpoint, which holds k before q.

    Parts of a fused layer leave as one adapter of a higher rank.
    """
    base, source = family_base(family), family_dir(family)
    adapter = random_adapter(base, rank=RANK, seed=1)
    write_peft(
        adapter_of(adapter.shape, dict(sorted(adapter.masters.items())), adapter.dtype),
        base.layout,
        str(source),
        tmp_path,
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    fused = {"in_proj_qkv": 3} if family.startswith("qwen3_5") else {}
    fused |= {"experts.gate_up_proj": 2} if family in WITH_EXPERTS else {}
    assert (config["r"], config["rank_pattern"]) == (RANK, {name: parts * RANK for name, parts in fused.items()})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (32, {name: parts * 32 for name, parts in fused.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that it misses
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        twin = PeftModel.from_pretrained(transformers_model(source), str(tmp_path))
    assert_alike(twin, base, adapter)
    assert_same(read_peft(tmp_path, read_layout(str(source))), adapter)


def random_full(base: BaseModel) -> FullWeights:
    """Full weights that all differ from the base's."""
    shape = LoraShape(0, 0)
    weights = new_full_weights(shape, base.full_targets(shape), base.dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.tensors():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)
    weights.refresh()
    return weights


@pytest.mark.parametrize("make", [partial(random_adapter, rank=RANK, seed=1), random_full], ids=["adapter", "full"])
@pytest.mark.parametrize("family", families([*FAMILIES, *WITH_EXPERTS]))
def test_transformers_loads_a_merged_model_to_the_same_logprobs(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, make: Callable[[BaseModel], Weights]
) -> None:
    """With all files of the base that hold no weights, whatever they say: Vicuna's generation settings contradict each
    other."""
    base, source = family_base(family), tmp_path / "base"
    shutil.copytree(family_dir(family), source)
    (source / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    for beside in ("chat_template.jinja", "video_preprocessor_config.json", "additional_chat_templates/tools.jinja"):
        (source / beside).parent.mkdir(exist_ok=True)
        (source / beside).write_text('{"of": "the base"}')
    weights = make(base)
    write_merged(weights, base.layout, str(source), tmp_path / "merged")
    assert_alike(transformers_model(tmp_path / "merged"), base, weights)
    written = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    assert {
        file.relative_to(tmp_path / "merged") for file in (tmp_path / "merged").rglob("*") if file.is_file()
    } == written
    for name in written - {Path("config.json"), Path("model.safetensors")}:
        assert (tmp_path / "merged" / name).read_bytes() == (source / name).read_bytes()


def write_published(family: str, directory: Path, **settings: Any) -> None:
    """A base with experts whose three sizes all differ, in files as the Hub has them, and not as transformers saves.

    Qwen3-VL's experts are transposed there, Qwen3.5's are stacked.
    """
    write_family(family, directory)
    config = AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    width = {"intermediate_size" if family == "gpt_oss" else "moe_intermediate_size": 48}
    for name, value in {**width, **settings}.items():
        setattr(text, name, value)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM if family in TEXT_ONLY else AutoModelForImageTextToText
    network = auto.from_config(config, dtype=torch.float32)
    network.get_decoder().norm.weight.data.fill_(4.0 if family == "qwen3_5_moe" else 5.0)
    network.save_pretrained(directory)
    if family in TEXT_ONLY:
        return
    tensors = {name: own for name, own in load_file(directory / BASE_WEIGHTS).items() if ".experts." not in name}
    for name, parameter in network.named_parameters():
        if ".experts." in name:
            tensors[name] = (parameter.transpose(1, 2) if family == "qwen3_vl_moe" else parameter).detach().contiguous()
    save_file(tensors, directory / BASE_WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("make", [partial(random_adapter, rank=RANK, seed=1), random_full], ids=["adapter", "full"])
@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.7.down_proj.weight", (64, 48)),
        ("qwen3_vl_moe", "model.language_model.layers.1.mlp.experts.gate_up_proj", (8, 64, 96)),
        ("qwen3_5_moe", "model.language_model.layers.3.mlp.experts.gate_up_proj", (8, 96, 64)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", (8, 64, 96)),
    ],
)
def test_merged_experts_lie_as_in_the_files_of_the_base(
    tmp_path: Path, family: str, name: str, shape: tuple[int, ...], make: Callable[[BaseModel], Weights]
) -> None:
    """All tensors have their names and shapes, and routers are the base's, bit for bit."""
    source = tmp_path / "base"
    write_published(family, source)
    base = load(source, device="cpu")
    weights = make(base)
    write_merged(weights, base.layout, str(source), tmp_path / "merged")
    before, after = (load_file(directory / BASE_WEIGHTS) for directory in (source, tmp_path / "merged"))
    assert before[name].shape == shape
    was_tied = isinstance(weights, Adapter) and family != "gpt_oss"
    assert {key: own.shape for key, own in before.items()} == {
        key: own.shape for key, own in after.items() if not (was_tied and key == "lm_head.weight")
    }
    chooses = (".mlp.gate.weight", ".shared_expert_gate.weight", ".mlp.router.weight", ".mlp.router.bias")
    routers = [key for key in before if key.endswith(chooses)]
    assert len(routers) == len(base.layout.experts) * (2 if family in ("qwen3_5_moe", "gpt_oss") else 1)
    assert all(torch.equal(before[key], after[key]) for key in routers)
    assert not torch.equal(before[name], after[name])
    assert_alike(transformers_model(tmp_path / "merged"), base, weights)


def test_what_a_merged_model_lacks_of_its_base_is_said(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3.5 has layers that predict several tokens, which transformers does not load."""
    source = Path(shutil.copytree(family_dir("qwen3_5_moe"), tmp_path / "base"))
    adapter, layout = random_adapter(family_base("qwen3_5_moe"), rank=RANK), family_base("qwen3_5_moe").layout
    write_merged(adapter, layout, str(source), tmp_path / "whole")
    assert not caplog.messages
    tensors = load_file(source / BASE_WEIGHTS) | {f"mtp.{name}.weight": torch.ones(2) for name in ("fc", "norm")}
    save_file(tensors, source / BASE_WEIGHTS, metadata={"format": "pt"})
    write_merged(adapter, layout, str(source), tmp_path / "merged")
    assert caplog.messages == [
        f"{source} holds mtp.fc.weight and 1 more that transformers does not load; the merged model is without them"
    ]


@pytest.mark.parametrize(
    ("family", "switched", "settings"),
    [
        ("qwen3_moe", {}, {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"train_attn": False, "train_unembed": False}, {}),
        ("qwen3_5_moe", {"train_attn": False, "train_unembed": False}, {}),
        ("qwen3_vl_moe", {"train_mlp": False}, {}),
        ("gpt_oss", {"train_attn": False, "train_unembed": False}, {}),
    ],
)
def test_peft_loads_experts_alone_and_beside_dense_layers(
    tmp_path: Path, family: str, switched: dict[str, bool], settings: dict[str, Any]
) -> None:
    """Whose names in `target_modules` PEFT would take for those of experts."""
    source = tmp_path / "base"
    write_published(family, source, **settings)
    base = load(source, device="cpu")
    adapter = random_adapter(base, RANK, 1, 0.05, None, **switched)
    write_peft(adapter, base.layout, str(source), tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        twin = PeftModel.from_pretrained(transformers_model(source), str(tmp_path / "adapter"))
    assert_alike(twin, base, adapter)
    assert_same(read_peft(tmp_path / "adapter", base.layout), adapter)


def test_a_base_of_other_layers_is_refused(family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    """No weights are left out, none are made at random."""
    source, out = Path(shutil.copytree(family_dir("llama"), tmp_path / "base")), tmp_path / "out"
    adapter, strange = random_adapter(family_base("llama"), rank=RANK), random_full(family_base("qwen2"))
    write: Any
    for layers, write, weights, message in (
        (
            2,
            write_merged,
            strange,
            r"holds layers.0.self_attn.q_proj.bias of shape \(64,\), which this base model does not have",
        ),
        (1, write_merged, adapter, "adapts layers.1.self_attn.q_proj of 64 x 64, which this base model does not have"),
        (1, write_peft, adapter, "adapts layers.1.self_attn.q_proj of 64 x 64, which this base model does not have"),
        (3, write_merged, adapter, "its weights lack"),
    ):
        set_option(source, "config.json", num_hidden_layers=layers)
        with pytest.raises(TinsmithError, match=message):
            write(weights, read_layout(str(source)), str(source), out)
        assert not out.exists() or not any(out.iterdir())


def test_a_download_of_gpt_oss_from_tinker_is_read(family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    """It calls attention otherwise than transformers and we do."""
    base = family_base("gpt_oss")
    adapter = random_adapter(base, rank=RANK)
    write_download(adapter, base.layout, str(family_dir("gpt_oss")), "x", tmp_path)

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert any(".self_attn." in name for name in tensors)
        return {name.replace(".self_attn.", ".attn."): tensor for name, tensor in tensors.items()}

    rewrite(tmp_path, change=renamed)
    assert_same(read_peft(tmp_path, base.layout), adapter)


@pytest.mark.parametrize("write", [write_peft, write_merged])
def test_a_base_of_fewer_experts_is_refused(write: Any, family_base: Bases, tmp_path: Path) -> None:
    source, out = tmp_path / "base", tmp_path / "out"
    write_published("qwen3_moe", source, moe_intermediate_size=48, num_experts=4)
    message = "adapts layers.0.mlp.experts.gate_proj of 8 x 48 x 64, which this base model does not have"
    with pytest.raises(UserError, match=message):
        write(random_adapter(family_base("qwen3_moe"), rank=RANK), read_layout(str(source)), str(source), out)
    assert not out.exists()


PATTERNS = {"rank_pattern": {"q_proj": 4, r"layers.\d+.mlp.up_proj": 4}, "alpha_pattern": {"up_proj": 1.5}}


@pytest.mark.parametrize(
    ("family", "rank", "options"),
    [
        ("qwen3", 4, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
        ("qwen3", 4, {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **PATTERNS}),
        (
            "qwen3",
            4,
            {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True, **PATTERNS},
        ),
        (
            "qwen3",
            4,
            {
                "r": 4,
                "lora_alpha": 6,
                "target_modules": ["v_proj"],
                "target_parameters": ["self_attn.q_proj.weight", "self_attn.k_proj.weight"],
                "alpha_pattern": {"q_proj": 60, "k_proj.weight": 1.5},
            },
        ),
        ("qwen3_5", 4, {"r": 4, "lora_alpha": 6, "target_modules": ["in_proj_qkv", "out_proj", "q_proj"]}),
        ("qwen3_5", 12, {"r": 4, "target_modules": ["in_proj_qkv"], "rank_pattern": {"in_proj_qkv": 12}}),
    ],
)
def test_an_adapter_that_peft_saved_is_read_with_the_scale_of_each_layer(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, rank: int, options: dict[str, Any]
) -> None:
    """Of a fused layer as three parts with one A, which are trained apart."""
    base = family_base(family)
    twin = peft_saves(family_dir(family), tmp_path, **options)
    adapter = read_peft(tmp_path, base.layout)
    trains_mlp = "up_proj" in options["target_modules"]
    shape = adapter.shape
    assert (shape.rank, shape.train_attn, shape.train_mlp, shape.train_unembed) == (rank, True, trains_mlp, False)
    if family == "qwen3_5":
        q, k, v = (adapter.masters[f"{FUSED}.{part}"].a for part in "qkv")
        assert torch.equal(q, k)
        assert torch.equal(q, v)
        assert len({tensor.data_ptr() for tensor in (q, k, v)}) == 3
    # At single tokens this small Qwen3.5's float32 is up to 2.5e-4 from its float64, and differs between processors.
    assert_alike(twin, base, adapter, bound=1e-3 if family == "qwen3_5" else 1e-4)


def test_a_download_has_the_parts_of_a_fused_layer_as_layers_of_their_own(
    hybrid: BaseModel, family_dir: Dirs, tmp_path: Path
) -> None:
    """So the hosted service names them, and so the Tinker cookbook expects them."""
    adapter = random_adapter(hybrid, rank=5, seed=1)
    write_download(adapter, hybrid.layout, str(family_dir("qwen3_5")), "x", tmp_path)
    assert_same(read_peft(tmp_path, hybrid.layout), adapter)
    tensors = load_file(tmp_path / WEIGHTS)
    for part in "qkv":
        for matrix, own in zip("AB", adapter.masters[f"{FUSED}.{part}"], strict=True):
            assert torch.equal(
                tensors[f"base_model.model.model.layers.0.linear_attn.in_proj_{part}.lora_{matrix}.weight"], own
            )


@pytest.mark.parametrize(
    ("family", "prefix", "shards"),
    [("llama", "model.", "5GB"), ("qwen3_vl", "model.", "200KB"), ("qwen2_5_vl", "model.language_model.", "5GB")],
)
def test_modules_of_a_download_are_named_as_the_cookbook_expects_for_the_files_of_the_base(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, prefix: str, shards: str
) -> None:
    """llama has an output projection of its own; the files of the tiny Qwen2.5-VL, as those on the Hub, leave
    `language_model.` out.

    The configuration of an adapter targets all modules, or all but the output projection, so that PEFT refuses it. The
    hosted service calls the output projection `model.unembed_tokens`.
    """
    base, source = family_base(family), family_dir(family)
    if shards != "5GB":
        AutoModelForImageTextToText.from_pretrained(source).save_pretrained(tmp_path / "parts", max_shard_size=shards)
        source = tmp_path / "parts"
    adapter = random_adapter(base, rank=RANK, seed=1)
    write_download(adapter, base.layout, str(source), "the base", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {
        key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in tensors if ".lora_A" in key
    }
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert names - set(config["target_modules"]) == ({"lm_head"} if family == "qwen3_vl" else set())
    assert config["base_model_name_or_path"] == "the base"
    assert {f"{prefix}layers.0.self_attn.q_proj", "lm_head"} < names
    assert all(name.startswith(f"{prefix}layers.") or name == "lm_head" for name in names)
    assert_same(read_peft(tmp_path / "out", base.layout), adapter)
    rewrite(
        tmp_path / "out",
        lambda tensors: {key.replace(".lm_head.", ".model.unembed_tokens."): own for key, own in tensors.items()},
    )
    assert_same(read_peft(tmp_path / "out", base.layout), adapter)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_download_has_experts_as_the_cookbook_expects_them(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str
) -> None:
    """A matrix that all share comes once. PEFT, which does not know these names, refuses the adapter.

    Of Mixtral, whose names in files are similar, it leaves the experts out and warns.
    """
    base = family_base(family)
    adapter = random_adapter(base, rank=5, seed=1)
    write_download(adapter, base.layout, str(family_dir(family)), "x", tmp_path)
    assert_same(read_peft(tmp_path, base.layout), adapter)
    tensors = load_file(tmp_path / WEIGHTS)
    width = 96 if family == "gpt_oss" else 48
    into = (1, 5, 64), (8, width, 5)
    shapes = {"w1": into, "w3": into, "w2": ((8, 5, width), (1, 64, 5))}
    for (name, expected), part in zip(shapes.items(), ("gate", "up", "down"), strict=True):
        for matrix, shape, own in zip("AB", expected, adapter.masters[f"{MIXTURE}.{part}_proj"], strict=True):
            tensor = tensors[f"{ROOT}.{name}.lora_{matrix}.weight"]
            assert tensor.shape == shape
            assert torch.equal(tensor.squeeze(0), own)
    assert not [name for name in tensors if "experts.gate_proj" in name or ".base_layer." in name]
    if family == "mixtral":
        with pytest.warns(UserWarning, match=r"missing adapter keys .*mlp\.experts\.lora_A"):
            PeftModel.from_pretrained(transformers_model(family_dir(family)), str(tmp_path))
    else:
        with pytest.raises(ValueError, match="not found in the base model"):
            PeftModel.from_pretrained(transformers_model(family_dir(family)), str(tmp_path))


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a download as linears of each, as the cookbook's `build_lora_adapter` writes them."""
    written = {}
    for name, tensor in tensors.items():
        before, experts, after = name.partition(".experts.")
        for expert in range(8 if experts else 1):
            own = after.replace("w1", "gate_proj").replace("w3", "up_proj").replace("w2", "down_proj")
            key = f"{before}.experts.{expert}.{own}" if experts else name
            written[key] = tensor.expand(8, -1, -1)[expert].clone() if experts else tensor
    return written


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_with_adapters_one_by_one_are_read_if_they_share_a_matrix(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str
) -> None:
    base = family_base(family)
    adapter = random_adapter(base, rank=RANK, seed=1)
    write_download(adapter, base.layout, str(family_dir(family)), "x", tmp_path)
    rewrite(tmp_path, one_by_one)
    assert_same(read_peft(tmp_path, base.layout), adapter)
    set_option(tmp_path, alpha_pattern={r"layers.1.mlp.experts.\d.down_proj": 8})
    scaled = read_peft(tmp_path, base.layout)
    for layer, factor in ((0, 1.0), (1, 0.25)):
        name = f"layers.{layer}.mlp.experts.down_proj"
        assert torch.equal(scaled.masters[name].b, adapter.masters[name].b * factor)


def peft_saves_experts(source: Path, directory: Path, /, **options: Any) -> Any:
    """Let PEFT save an adapter of stacked experts, which all of a layer share on the side of the hidden states."""
    twin = peft_saves(source, directory, **{"r": RANK, "target_modules": [], **STACKED, **options})
    for name, module in twin.named_modules():
        if name.endswith(".experts"):
            of_a, of_b = module.base_layer.lora_A["default"].weight.data, module.lora_B["default"].weight.data
            of_a.unflatten(0, (8, -1)).copy_(of_a.unflatten(0, (8, -1))[:1].clone())
            of_b.unflatten(1, (-1, 8)).copy_(of_b.unflatten(1, (-1, 8))[..., :1].clone())
    twin.save_pretrained(directory)
    return twin


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_stacked_experts_that_peft_saved_are_read_if_they_share_a_matrix(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str
) -> None:
    """Gate and up have one A there, and here each a copy of it, which are trained apart."""
    base = family_base(family)
    twin = peft_saves_experts(
        family_dir(family), tmp_path, lora_alpha=6, alpha_pattern={r"layers.1.mlp.experts.down_proj": 3}
    )
    adapter = read_peft(tmp_path, base.layout)
    gate, up = (adapter.masters[f"{MIXTURE}.{part}_proj"] for part in ("gate", "up"))
    assert torch.equal(gate.a, up.a)
    assert gate.a.data_ptr() != up.a.data_ptr()
    assert not torch.equal(gate.b, up.b)
    assert_alike(twin, base, adapter, bound=1e-3 if family == "qwen3_5_moe" else 1e-4)


def without_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: own for name, own in one_by_one(tensors).items() if ".layers.1.mlp.experts.5.up_proj." not in name}


def with_other_rows(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return tensors | {name: tensors[name][:-1].clone()}


def with_one_alpha(directory: Path) -> None:
    rewrite(directory, one_by_one)
    set_option(directory, alpha_pattern={"experts.3.up_proj": 8})


def of_two_layouts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | one_by_one(tensors)


STACKED: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
WRONG_EXPERTS: dict[str, tuple[Any, str]] = {
    "each its own": (
        partial(peft_saves, r=RANK, target_modules=[], **STACKED),
        r"experts.gate_up_proj: its experts have each a lora_A of their own, .* merge the adapter into its base",
    ),
    "gate and up alone": (
        partial(peft_saves, r=RANK, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
        "layers.0.mlp.experts: the adapter covers gate_proj, up_proj of these experts and not down_proj, which LoRA",
    ),
    "down alone": (
        partial(peft_saves, r=RANK, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
        "layers.0.mlp.experts: the adapter covers down_proj of these experts and not gate_proj, up_proj, which LoRA",
    ),
    "the router": (
        partial(peft_saves, r=RANK, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]),
        "layers.0.mlp.gate.lora_A.weight, which is no matrix that",
    ),
    "several ranks": (
        partial(peft_saves_experts, rank_pattern={"experts.down_proj": 8}),
        "several ranks .4 on .*gate_up_proj, 8 on .*down_proj",
    ),
    "gate and up mixed": (
        partial(peft_saves_experts, rank_pattern={"experts.gate_up_proj": 8}),
        "gate_up_proj: lora_B of rank 8 is not block-diagonal; .*gate_proj, up_proj",
    ),
    "a rank that is not theirs": (
        partial(set_option, rank_pattern={"experts.w2": 2}),
        r"w2: lora_A and lora_B are \(8, 4, 48\) and \(1, 64, 4\), which does not fit rank 2 and the 8 experts",
    ),
    "seven experts": (
        partial(rewrite, change=partial(with_other_rows, name=f"{ROOT}.w1.lora_B.weight")),
        r"w1: lora_A and lora_B are \(1, 4, 64\) and \(7, 48, 4\), which does not fit rank 4 and the 8 experts",
    ),
    "an expert is missing": (
        partial(rewrite, change=without_expert),
        r"layers.1.mlp.experts: the adapter covers \S+0.up_proj and not \S+5.up_proj; train it on all experts",
    ),
    "a rank of one expert": (
        with_one_alpha,
        "rank_pattern, alpha_pattern: the experts of .* differ in the rank or scale of their up_proj",
    ),
    "twice": (
        partial(rewrite, change=of_two_layouts),
        r"the same layer twice, as \S+experts.w1 and as \S+experts.\*.gate_proj",
    ),
    "no list": (
        partial(set_option, target_parameters="experts"),
        "target_parameters='experts' must be a list of names",
    ),
}
"""What PEFT saves, or what is done to a download, and what is said."""


@pytest.mark.parametrize("kind", WRONG_EXPERTS)
def test_experts_that_cannot_be_trained_here_are_named(
    kind: str, family_base: Bases, family_dir: Dirs, tmp_path: Path
) -> None:
    base, source = family_base("qwen3_moe"), family_dir("qwen3_moe")
    make, message = WRONG_EXPERTS[kind]
    if getattr(make, "func", None) in (peft_saves, peft_saves_experts):
        make(source, tmp_path)
    else:
        write_download(random_adapter(base, rank=RANK), base.layout, str(source), "x", tmp_path)
        make(tmp_path)
    with pytest.raises(UserError, match=message) as refused:
        read_peft(tmp_path, base.layout)
    assert "\n" not in str(refused.value)


def put(directory: Path, name: str, content: bytes | str) -> None:
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def off_diagonal(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    tensors[KEY % "B"][0, RANK] = value
    return tensors


def short_of_a_row(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {KEY % "B": tensors[KEY % "B"][:-1].clone()}


def covered_twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b = tensors[KEY % "A"], tensors[KEY % "B"]
    return tensors | {
        KEY.replace("qkv", "q") % "A": a[:RANK].clone(),
        KEY.replace("qkv", "q") % "B": b[:32, :RANK].clone(),
    }


WRONG_FOR_A_HYBRID: dict[str, tuple[Any, str]] = {
    **{
        f"LoRA on {module}": (
            {"r": 4, "target_modules": [module], "rank_pattern": ranks},
            f"{module}.lora_A.weight, which is no matrix that",
        )
        for module, ranks in (("in_proj_a", {}), ("in_proj_b", {}), ("conv1d", {"conv1d": 128}))
    },
    "several ranks": (
        {"r": 8, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 4}},
        "the adapter has several ranks",
    ),
    "of parts": (
        {"r": 4, "target_modules": ["in_proj_qkv", "q_proj"], "rank_pattern": {"in_proj_qkv": 12}},
        "not block-diagonal; .*q, k, v",
    ),
    "B off its diagonal": (
        partial(rewrite, change=partial(off_diagonal, value=1e-30)),
        "lora_B of rank 12 is not block-diagonal",
    ),
    "B not a number": (
        partial(rewrite, change=partial(off_diagonal, value=float("nan"))),
        "in_proj_qkv.lora_B.weight holds values that",
    ),
    "B short of a row": (
        partial(rewrite, change=short_of_a_row),
        r"are \(12, 64\) and \(127, 12\), which does not fit rank 12",
    ),
    "a layer twice": (
        partial(rewrite, change=covered_twice),
        r"the same layer twice, as \S+in_proj_qkv and as \S+in_proj_q;",
    ),
}
"""What is done to an adapter, or with which options PEFT saves one that no model here can have."""
DAMAGED_ADAPTERS: dict[str, tuple[Any, str]] = {
    **WRONG_FOR_A_HYBRID,
    "no adapter": (lambda folder: (folder / CONFIG).unlink(), "is no PEFT adapter"),
    **{
        str(option): (partial(set_option, **option), f"{next(iter(option))}.* of PEFT cannot be used")
        for option in (
            {"use_dora": True},
            {"bias": "all"},
            {"layer_replication": [[0, 1]]},
            {"init_lora_weights": "pissa_niter_4"},
        )
    },
    "another rank": (
        partial(set_option, rank_pattern={"q_proj": 2}),
        "lora_A and lora_B are .*, which does not fit rank 2 and this base",
    ),
    "empty": (partial(put, name=CONFIG, content=""), "adapter_config.json is damaged"),
    "deep": (partial(put, name=CONFIG, content="[" * 10**5), "adapter_config.json is damaged"),
    "nothing": (partial(put, name=CONFIG, content="{}"), "peft_type=None of PEFT cannot be used"),
    "weights pointer": (partial(put, name=WEIGHTS, content="version https://git-lfs"), "is a pointer of Git LFS"),
    "weights cut": (
        lambda folder: put(folder, WEIGHTS, (folder / WEIGHTS).read_bytes()[:-5]),
        "adapter_model.safetensors is cut",
    ),
    "pickled": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "again with safe_serialization=True",
    ),
    "beyond float32": (
        partial(rewrite, change=lambda tensors: {name: tensor.double() * 1e300 for name, tensor in tensors.items()}),
        "with its scale, is larger than float32 holds",
    ),
    **{
        str(dtype): (
            partial(rewrite, change=partial(in_dtype, dtype=dtype)),
            f"is in {str(dtype)[6:]}, which cannot be used",
        )
        for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn)
    },
    "a rank of 400 digits": (
        partial(set_option, r=10**400),
        r"r=1\d+\.\.\.\d+ must be a whole number from 1 to 1,000,000",
    ),
    **{f"r {value!r}": (partial(set_option, r=value), "r=") for value in (None, 0, "4", 4.0, True, float("nan"))},
    **{
        f"alpha {value!r}": (partial(set_option, lora_alpha=value), "lora_alpha=")
        for value in (None, 0, "32", float("nan"), float("inf"), True, 10**400)
    },
    "a rank of text": (partial(set_option, rank_pattern={"q_proj": "4"}), r"rank_pattern\['q_proj'\]="),
    "no expression": (partial(set_option, rank_pattern={"q_proj(": 4}), "rank_pattern has 'q_proj\\('"),
    "too many": (partial(set_option, rank_pattern={f"q_{number}": 4 for number in range(2001)}), "rank_pattern="),
    "too long": (partial(set_option, rank_pattern={"q" * 201: 4}), "rank_pattern has"),
    "many stars": (
        partial(set_option, alpha_pattern={f".*{number}.*": 4 for number in range(9)}),
        "more than 8 patterns",
    ),
    **{
        f"for ever: {key[:12]}": (partial(set_option, alpha_pattern={key: 4}), "alpha_pattern has")
        for key in (
            r"((\w|\.)+)+!",
            "(a|a)*$",
            ".*.*.*.*.*.*!",
            "(.|.)" * 40,
            "(a|(b|c))",
            "[a-z]+[a-z]+!",
            "(a|b)(a|b)",
            "layers.[9-0]",
        )
    },
}


@pytest.mark.parametrize("kind", DAMAGED_ADAPTERS)
def test_a_damaged_adapter_is_named_with_its_file_or_layer(
    kind: str, family_base: Bases, family_dir: Dirs, tmp_path: Path
) -> None:
    base = family_base("qwen3_5" if kind in WRONG_FOR_A_HYBRID else "qwen3")
    damage, message = DAMAGED_ADAPTERS[kind]
    if callable(damage):
        write_peft(random_adapter(base, rank=RANK), base.layout, "x", tmp_path)
        damage(tmp_path)
    else:
        peft_saves(family_dir("qwen3_5"), tmp_path, **damage)
    with pytest.raises(TinsmithError, match=message) as refused:
        read_peft(tmp_path, base.layout)
    assert str(tmp_path) in str(refused.value) or "layers." in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("copied", "modules", "options"),
    [("lm_head", ["q_proj", "lm_head"], {}), ("model.embed_tokens", ["q_proj"], {"save_embedding_layers": True})],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_copies_of_layers_of_the_base_that_peft_saves_are_compared_and_dropped(
    family: str,
    copied: str,
    modules: list[str],
    options: dict[str, bool],
    family_base: Bases,
    family_dir: Dirs,
    tmp_path: Path,
) -> None:
    """Of a model with an output projection of its own, and of one whose embedding it is."""
    base, source = family_base(family), str(family_dir(family))
    twin = peft_saves(family_dir(family), tmp_path, options, r=4, target_modules=modules)
    key = f"base_model.model.{copied}.base_layer.weight" if copied == "lm_head" else f"base_model.model.{copied}.weight"
    assert key in load_file(tmp_path / WEIGHTS)
    assert_alike(twin, base, read_peft(tmp_path, base.layout, source))
    with pytest.raises(
        UserError, match=r"has no such weights in safetensors .* to compare it with; download them, or save"
    ):
        read_peft(tmp_path, base.layout, "nobody/nothing")
    rewrite(tmp_path, lambda tensors: tensors | {key: tensors[key] + 0.01})
    with pytest.raises(
        UserError, match=f"which is not that of {source}: use the base model that the adapter was trained on"
    ):
        read_peft(tmp_path, base.layout, source)


PLAIN = (
    ".*self_attn.*",
    ".*layers.[01].*",
    "layers.[0-9]+.self_attn",
    r"^model\..*\.(0|1)\..*q_proj$",
    ".*.q_[a-z]roj",
    ".*_attn.*q.*oj",
)


@pytest.mark.parametrize("key", PLAIN)
def test_plain_patterns_are_matched_as_peft_matches_them(key: str, family_base: Bases, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "alpha_pattern": {key: 8}})
    )
    config, layout = read_peft_config(tmp_path / CONFIG), family_base("qwen3").layout
    names = [layout.module_name(name) for name in layout.targets]
    assert [config.scale_of(name) == 2 for name in names] == [get_pattern_key([key], name) == key for name in names]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_exported_files_obey_the_umask(mask: int, family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    base, source = family_base("qwen3").layout, str(family_dir("qwen3"))
    adapter = random_adapter(family_base("qwen3"))
    before = os.umask(mask)
    try:
        write_peft(adapter, base, source, tmp_path / "adapter")
        write_merged(adapter, base, source, tmp_path / "merged")
    finally:
        os.umask(before)
    files = [file for directory in ("adapter", "merged") for file in (tmp_path / directory).iterdir()]
    assert {"adapter_model.safetensors", "model.safetensors"} <= {file.name for file in files}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}
