"""Adapters leave for PEFT and as downloads and come back; transformers and PEFT load them, and merged models, to the same logprobs.

What the cookbook makes of downloads: tests/recipes.

Invariant: Transformers and PEFT load an exported checkpoint to the same logprobs, and it comes back; an export is complete or absent.
Also: `tests/commands/test_exchange.py`, `tests/acceptance/test_exchange.py`.

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
from transformers import AutoModelForImageTextToText

from tests.bases import datum, load, picture_chunks, random_adapter, random_tokens, renderer, shifted, transformers_model
from tests.extent import families
from tests.training.test_against_peft import twin_logprobs
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, new_full_weights
from tinsmith.models.layout import Layout, read_layout
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import LocalBackend
from tinsmith.training.download_format import write_download
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.peft_config import read_peft_config
from tinsmith.training.peft_format import read_peft, write_merged, write_peft

FAMILIES = ["llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
Bases = Callable[[str], BaseModel]
Dirs = Callable[[str], Path]
RANK = 4
FUSED = "layers.0.linear_attn.in_proj_qkv"
"""A fused layer, whose queries, keys and values have adapters of their own."""
KEY = f"base_model.model.model.language_model.{FUSED}.lora_%s.weight"


@pytest.fixture(scope="module")
def family_base(family_dir: Dirs) -> Bases:
    """Base models on the CPU, wherever the other tests compute: that is where files are made and merged."""
    return cache(lambda family: load(family_dir(family), device="cpu"))


@pytest.fixture
def hybrid(family_base: Bases) -> BaseModel:
    """A small Qwen3.5."""
    return family_base("qwen3_5")


@pytest.fixture
def layout_of(family_dir: Dirs) -> Callable[[str], Layout]:
    """What the configuration of a family says."""
    return lambda family: read_layout(str(family_dir(family)))


def example(base: BaseModel) -> RenderedInput:
    return renderer(base).render(picture_chunks(base, 1, 10) if base.family.takes_images else [random_tokens(1, 12)])


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


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of an adapter folder."""
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def peft_saves(source: Path, directory: Path, **options: Any) -> Any:
    """Let PEFT make a random adapter of the base and save it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT has thoughts of its own about adapters of a convolution
        twin: Any = get_peft_model(transformers_model(source), LoraConfig(init_lora_weights=False, **options))
        twin.save_pretrained(directory)
    return twin


@pytest.mark.parametrize("in_alphabetical_order", [False, True])
@pytest.mark.parametrize("family", families(FAMILIES))
def test_peft_loads_an_adapter_to_the_same_logprobs(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, in_alphabetical_order: bool
) -> None:
    """Also one from the file of a checkpoint, which holds k before q. Parts of a fused layer leave as one adapter of a higher rank."""
    base, source = family_base(family), family_dir(family)
    adapter = saved = random_adapter(base, rank=RANK, seed=1)
    if in_alphabetical_order:
        saved = Adapter(adapter.shape, dict(sorted(adapter.masters.items())), adapter.dtype)
    write_peft(saved, base.layout, str(source), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    fused = {"in_proj_qkv": 3} if family == "qwen3_5" else {}
    assert (config["r"], config["rank_pattern"]) == (RANK, {name: parts * RANK for name, parts in fused.items()})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (32, {name: parts * 32 for name, parts in fused.items()})
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert len(keys) == 2 * len({base.layout.targets[name].module for name in adapter.masters})
    assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in keys)
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
@pytest.mark.parametrize("family", families(FAMILIES))
def test_transformers_loads_a_merged_model_to_the_same_logprobs(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, make: Callable[[BaseModel], Weights]
) -> None:
    """With all files of the base that hold no weights, whatever they say: Vicuna's generation settings contradict each other."""
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
    assert {file.relative_to(tmp_path / "merged") for file in (tmp_path / "merged").rglob("*") if file.is_file()} == written
    for name in written - {Path("config.json"), Path("model.safetensors")}:
        assert (tmp_path / "merged" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(("layers", "merge"), [(1, False), (1, True), (3, True)])
def test_a_base_of_other_layers_is_refused(family_base: Bases, family_dir: Dirs, tmp_path: Path, layers: int, merge: bool) -> None:
    """The same weights behind a configuration that was changed: none are left out, none are made at random."""
    source = Path(shutil.copytree(family_dir("llama"), tmp_path / "base"))
    adapter = random_adapter(family_base("llama"), rank=RANK)
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}))
    base = read_layout(str(source))
    expected = "adapts layers.1.self_attn.q_proj of 64 x 64, which this base model does not have" if layers == 1 else "its weights lack"
    write = partial(write_merged, adapter, base, str(source)) if merge else partial(write_peft, adapter, base, "x")
    with pytest.raises(TinsmithError, match=expected):
        write(tmp_path / "out")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_full_weights_of_another_base_are_not_merged(family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    source = str(family_dir("llama"))
    with pytest.raises(UserError, match=r"holds layers.0.self_attn.q_proj.bias of shape \(64,\), which this base model does not have"):
        write_merged(random_full(family_base("qwen2")), read_layout(source), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


PATTERNS = {"rank_pattern": {"q_proj": 4, r"layers.\d+.mlp.up_proj": 4}, "alpha_pattern": {"up_proj": 1.5}}


@pytest.mark.parametrize(
    ("family", "rank", "options"),
    [
        ("qwen3", 4, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
        ("qwen3", 4, {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **PATTERNS}),
        ("qwen3", 4, {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True, **PATTERNS}),
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


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "qwen3",
            {"r": 8, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 4}},
            r"rank_pattern: the adapter has several ranks \(4 on model\.\S+q_proj, 8 on model\.\S+up_proj\)",
        ),
        (
            "qwen3_5",
            {"r": 4, "target_modules": ["in_proj_qkv", "q_proj"], "rank_pattern": {"in_proj_qkv": 12}},
            r"in_proj_qkv: lora_B of rank 12 is not block-diagonal; .* an adapter of rank 4 on each .*q, k, v",
        ),
        *(
            (
                "qwen3_5",
                {"r": 4, "target_modules": ["q_proj", strange], "rank_pattern": {"conv1d": 128} if strange == "conv1d" else {}},
                rf"layers.0.linear_attn.{strange}.lora_A.weight, which is no matrix that LoRA trains on this base",
            )
            for strange in ("in_proj_a", "in_proj_b", "conv1d")
        ),
    ],
)
def test_an_adapter_that_peft_saved_and_no_model_here_can_have_is_refused(
    layout_of: Callable[[str], Layout], family_dir: Dirs, tmp_path: Path, family: str, options: dict[str, Any], message: str
) -> None:
    peft_saves(family_dir(family), tmp_path, **options)
    with pytest.raises(UserError, match=message):
        read_peft(tmp_path, layout_of(family))


def test_what_is_no_plain_lora_of_this_base_is_refused(family_base: Bases, layout_of: Callable[[str], Layout], tmp_path: Path) -> None:
    base = layout_of("qwen3_vl")
    with pytest.raises(UserError, match="is no PEFT adapter"):
        read_peft(tmp_path, base)
    write_peft(random_adapter(family_base("qwen3_vl"), rank=RANK), base, "x", tmp_path)
    with pytest.raises(UserError, match=r"model\.language_model\.layers\.\S+, which is no matrix that LoRA trains on this base model"):
        read_peft(tmp_path, layout_of("qwen3"))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for option, value in (("use_dora", True), ("bias", "all"), ("layer_replication", [[0, 1]]), ("init_lora_weights", "pissa_niter_4")):
        path.write_text(json.dumps(config | {option: value}))
        with pytest.raises(UserError, match=f"{option}.* of PEFT cannot be used"):
            read_peft(tmp_path, base)
    path.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj: lora_A and lora_B are .*, which does not fit rank 2 and this base"):
        read_peft(tmp_path, base)


def off_diagonal(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    tensors[KEY % "B"][0, RANK] = value
    return tensors


def covered_twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b = tensors[KEY % "A"], tensors[KEY % "B"]
    return tensors | {KEY.replace("qkv", "q") % "A": a[:RANK].clone(), KEY.replace("qkv", "q") % "B": b[:32, :RANK].clone()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (partial(off_diagonal, value=1e-30), r"layers.0.linear_attn.in_proj_qkv: lora_B of rank 12 is not block-diagonal"),
        (partial(off_diagonal, value=float("nan")), r"in_proj_qkv.lora_B.weight holds values that are not finite"),
        (
            lambda tensors: tensors | {KEY % "B": tensors[KEY % "B"][:-1].clone()},
            r"in_proj_qkv: lora_A and lora_B are \(12, 64\) and \(127, 12\), which does not fit rank 12",
        ),
        (covered_twice, r"the same layer twice, as \S+in_proj_qkv and as \S+in_proj_q;"),
    ],
)
def test_what_a_fused_layer_cannot_have_is_refused(hybrid: BaseModel, tmp_path: Path, change: Any, message: str) -> None:
    write_peft(random_adapter(hybrid, rank=RANK), hybrid.layout, "x", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        read_peft(tmp_path, hybrid.layout)


@pytest.mark.parametrize("rank", [1, 5, 32])
def test_parts_come_back_bit_for_bit(hybrid: BaseModel, family_dir: Dirs, tmp_path: Path, rank: int) -> None:
    """A download has them as layers of their own: so the hosted service names them, and so the Tinker cookbook expects them."""
    adapter = random_adapter(hybrid, rank=rank, seed=1)
    write_peft(adapter, hybrid.layout, "x", tmp_path / "peft")
    write_download(adapter, hybrid.layout, str(family_dir("qwen3_5")), "x", tmp_path / "download")
    for directory in ("peft", "download"):
        assert_same(read_peft(tmp_path / directory, hybrid.layout), adapter)
    tensors = load_file(tmp_path / "download" / "adapter_model.safetensors")
    assert all(len(tensor) == rank for key, tensor in tensors.items() if ".lora_A." in key)
    for part in "qkv":
        name = f"base_model.model.model.layers.0.linear_attn.in_proj_{part}"
        for matrix, own in zip("AB", adapter.masters[f"{FUSED}.{part}"], strict=True):
            assert torch.equal(tensors[f"{name}.lora_{matrix}.weight"], own)


@pytest.mark.parametrize(
    ("family", "prefix", "shards"),
    [
        ("llama", "model.", "5GB"),
        ("qwen3", "model.", "5GB"),
        ("qwen3_vl", "model.", "5GB"),
        ("qwen3_vl", "model.", "200KB"),
        ("qwen2_5_vl", "model.language_model.", "5GB"),
    ],
)
def test_modules_of_a_download_are_named_as_the_cookbook_expects_for_the_files_of_the_base(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, prefix: str, shards: str
) -> None:
    """llama has an output projection of its own; the files of the tiny Qwen2.5-VL, as those on the Hub, leave `language_model.` out.

    The configuration of an adapter targets all modules, or all but the output projection, so that PEFT refuses it.
    """
    base, source = family_base(family), family_dir(family)
    if shards != "5GB":
        AutoModelForImageTextToText.from_pretrained(source).save_pretrained(tmp_path / "parts", max_shard_size=shards)
        source = tmp_path / "parts"
        assert len(list(source.glob("*.safetensors"))) > 1
    adapter = random_adapter(base, rank=RANK, seed=1)
    write_download(adapter, base.layout, str(source), "the base", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in tensors if ".lora_A" in key}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert names - set(config["target_modules"]) == ({"lm_head"} if family == "qwen3_vl" else set())
    assert config["base_model_name_or_path"] == "the base"
    assert {f"{prefix}layers.0.self_attn.q_proj", "lm_head"} < names
    assert all(name.startswith(f"{prefix}layers.") or name == "lm_head" for name in names)
    assert_same(read_peft(tmp_path / "out", base.layout), adapter)


def set_option(directory: Path, **options: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


def in_dtype(directory: Path, dtype: torch.dtype) -> None:
    rewrite(directory, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})


def put(directory: Path, name: str, content: bytes | str) -> None:
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def large_with_scale(directory: Path) -> None:
    set_option(directory, lora_alpha=9e29)
    rewrite(directory, lambda tensors: {name: tensor * 1e30 for name, tensor in tensors.items()})


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DAMAGED_ADAPTERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (partial(put, name=CONFIG, content=""), "adapter_config.json is damaged"),
    "list": (partial(put, name=CONFIG, content="[]"), "adapter_config.json is damaged"),
    "deep": (partial(put, name=CONFIG, content="[" * 10**5), "adapter_config.json is damaged"),
    "bytes": (partial(put, name=CONFIG, content=b"\xff"), "adapter_config.json is damaged"),
    "pointer": (partial(put, name=CONFIG, content="version https://git-lfs"), "is a pointer of Git LFS"),
    "nothing": (partial(put, name=CONFIG, content="{}"), "peft_type=None of PEFT cannot be used"),
    "weights pointer": (partial(put, name=WEIGHTS, content="version https://git-lfs"), "is a pointer of Git LFS"),
    "weights cut": (lambda folder: put(folder, WEIGHTS, (folder / WEIGHTS).read_bytes()[:-5]), "adapter_model.safetensors is cut"),
    "weights garbage": (partial(put, name=WEIGHTS, content=b"\xff" * 50), "adapter_model.safetensors is damaged or cut"),
    "pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "again with safe_serialization=True"),
    "beyond float32": (
        partial(rewrite, change=lambda tensors: {name: tensor.double() * 1e300 for name, tensor in tensors.items()}),
        "with its scale, is larger than float32 holds",
    ),
    "a scale beyond float32": (
        large_with_scale,
        "with its scale, is larger than float32 holds",
    ),
    "a rank of 400 digits": (partial(set_option, r=10**400), r"r=1\d+\.\.\.\d+ must be a whole number from 1 to 1,000,000"),
    "a class of nothing": (partial(set_option, alpha_pattern={"layers.[9-0]": 4}), "alpha_pattern has"),
    "many stars": (partial(set_option, alpha_pattern={f".*{number}.*": 4 for number in range(9)}), "more than 8 patterns"),
    "whole numbers": (partial(in_dtype, dtype=torch.int64), "is in int64, which cannot be used"),
    "complex": (partial(in_dtype, dtype=torch.complex64), "is in complex64, which cannot be used"),
    "eight bits": (partial(in_dtype, dtype=torch.float8_e4m3fn), "is in float8_e4m3fn, which cannot be used"),
    **{f"r {value!r}": (partial(set_option, r=value), "r=") for value in (None, 0, -4, "4", 4.0, True, [4], float("nan"))},
    **{
        f"alpha {value!r}": (partial(set_option, lora_alpha=value), "lora_alpha=")
        for value in (None, 0, -1, "32", float("nan"), float("inf"), True, 10**400)
    },
    "ranks a list": (partial(set_option, rank_pattern=["q_proj"]), "rank_pattern="),
    "a rank of text": (partial(set_option, rank_pattern={"q_proj": "4"}), r"rank_pattern\['q_proj'\]="),
    "an alpha of nothing": (partial(set_option, alpha_pattern={"q_proj": None}), r"alpha_pattern\['q_proj'\]="),
    "no expression": (partial(set_option, rank_pattern={"q_proj(": 4}), "rank_pattern has 'q_proj\\('"),
    "too many": (partial(set_option, rank_pattern={f"q_{number}": 4 for number in range(2001)}), "rank_pattern="),
    "too long": (partial(set_option, rank_pattern={"q" * 201: 4}), "rank_pattern has"),
    **{
        f"for ever: {key[:12]}": (partial(set_option, alpha_pattern={key: 4}), "alpha_pattern has")
        for key in (r"((\w|\.)+)+!", "(a|a)*$", ".*.*.*.*.*.*!", "(.|.)" * 40, r"(\w+\.)+x", "(a|(b|c))", "[a-z]+[a-z]+!", "(a|b)(a|b)")
    },
}


@pytest.mark.parametrize("kind", DAMAGED_ADAPTERS)
def test_a_damaged_adapter_is_named_with_its_file(
    kind: str, family_base: Bases, layout_of: Callable[[str], Layout], tmp_path: Path
) -> None:
    write_peft(random_adapter(family_base("qwen3"), rank=RANK), layout_of("qwen3"), "x", tmp_path)
    damage, message = DAMAGED_ADAPTERS[kind]
    damage(tmp_path)
    with pytest.raises(TinsmithError, match=message) as refused:
        read_peft(tmp_path, layout_of("qwen3"))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_copy_of_the_output_projection_that_peft_saves_is_compared_and_dropped(
    family: str, family_base: Bases, family_dir: Dirs, tmp_path: Path
) -> None:
    """Of a model with one of its own, and of one whose embedding it is."""
    base, source = family_base(family), str(family_dir(family))
    twin = peft_saves(family_dir(family), tmp_path, r=4, target_modules=["q_proj", "lm_head"])
    copied = "base_model.model.lm_head.base_layer.weight"
    assert copied in load_file(tmp_path / WEIGHTS)
    assert_alike(twin, base, read_peft(tmp_path, base.layout, source))
    with pytest.raises(UserError, match=r"has no such weights in safetensors .* to compare it with; download them, or save"):
        read_peft(tmp_path, base.layout, "nobody/nothing")
    rewrite(tmp_path, lambda tensors: tensors | {copied: tensors[copied] + 0.01})
    with pytest.raises(UserError, match=f"which is not that of {source}: use the base model that the adapter was trained on"):
        read_peft(tmp_path, base.layout, source)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_copies_of_embedding_layers_are_compared_and_dropped(family: str, family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    """`save_embedding_layers=True` saves them also where no adapter changes them."""
    base, source = family_base(family), str(family_dir(family))
    twin = peft_saves(family_dir(family), tmp_path, r=4, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        twin.save_pretrained(tmp_path, save_embedding_layers=True)
    copied = "base_model.model.model.embed_tokens.weight"
    assert copied in load_file(tmp_path / WEIGHTS)
    assert_alike(twin, base, read_peft(tmp_path, base.layout, source))
    rewrite(tmp_path, lambda tensors: tensors | {copied: tensors[copied] + 0.01})
    with pytest.raises(UserError, match=f"which is not that of {source}"):
        read_peft(tmp_path, base.layout, source)


PLAIN = (".*self_attn.*", ".*layers.[01].*", "layers.[0-9]+.self_attn", r"^model\..*\.(0|1)\..*q_proj$", ".*.q_[a-z]roj", ".*_attn.*q.*oj")


@pytest.mark.parametrize("key", PLAIN)
def test_plain_patterns_are_matched_as_peft_matches_them(key: str, layout_of: Callable[[str], Layout], tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "alpha_pattern": {key: 8}}))
    config, layout = read_peft_config(tmp_path / CONFIG), layout_of("qwen3")
    names = [layout.module_name(name) for name in layout.targets]
    assert [config.scale_of(name) == 2 for name in names] == [get_pattern_key([key], name) == key for name in names]


def test_a_download_of_the_hosted_service_is_read(family_base: Bases, tmp_path: Path) -> None:
    """It calls the output projection `model.unembed_tokens`."""
    base = family_base("qwen3_vl")
    adapter = random_adapter(base, rank=RANK, seed=1)
    write_peft(adapter, base.layout, "the base", tmp_path)
    names = {".lm_head.": ".model.unembed_tokens.", "model.language_model.": "model."}

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for ours, theirs in names.items():
            tensors = {key.replace(ours, theirs): own for key, own in tensors.items()}
        return tensors

    rewrite(tmp_path, renamed)
    assert_same(read_peft(tmp_path, base.layout), adapter)
