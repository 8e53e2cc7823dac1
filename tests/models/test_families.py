"""Positions against transformers' own, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.bases import load, picture_chunks, random_tokens, renderer, write_decoder
from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.families import IMAGE_FAMILIES, Family, family_of, positions, read_config
from tinsmith.models.layers import Attention, DeltaNet
from tinsmith.models.sizing import size_of
from tinsmith.rendering.processor import LocalProcessor


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_equal_transformers(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    chunks = [*picture_chunks(base, 1, 5, width=64, height=160), *picture_chunks(base, 3, 4, width=224, height=32), random_tokens(9, 3)]
    rendered = renderer(base).render(chunks)
    ids = torch.from_numpy(rendered.token_ids).long().unsqueeze(0)
    grids = torch.tensor([picture.grid_thw for picture in rendered.pictures])
    expected, delta = base.network.model.get_rope_index(ids, (ids == base.config.image_token_id).int(), image_grid_thw=grids)
    assert torch.equal(rendered.positions, expected[:, 0])
    assert rendered.next_position == len(rendered) + delta.item()


def test_a_hybrid_model_without_a_tower_is_taken(family_base: Callable[[str], BaseModel]) -> None:
    """Of Qwen3.5's language model alone. That it computes what transformers does: tests/sampling/test_self_check.py."""
    base = family_base("qwen3_5_text")
    assert base.family == Family("qwen3_5_text")
    assert [type(layer) for layer in base.layout.layers] == [DeltaNet, DeltaNet, DeltaNet, Attention]


def test_layers_for_speculation_are_left_out(
    family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel], tmp_path: Path
) -> None:
    """Checkpoints of Qwen3.5 hold weights of a layer that guesses several tokens (`mtp.`), which the model itself does not use."""
    shutil.copytree(family_dir("qwen3_5"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": torch.ones(64, 128), "mtp.norm.weight": torch.ones(64)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    base, plain = load(tmp_path), family_base("qwen3_5")
    assert base.layout == plain.layout
    found, expected = base.network.state_dict(), plain.network.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_text_positions_count_up() -> None:
    assert positions(Family("qwen3"), 4, (), 1).tolist() == [[0, 1, 2, 3]]
    assert positions(IMAGE_FAMILIES["qwen3_vl"], 3, (), 2).tolist() == [[0, 1, 2]] * 3


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    unreachable = (
        "org/model: the model's configuration cannot be read: We couldn't connect to 'https://huggingface.co' to load the files, and "
        "couldn't find them in the cached files; there is no directory of that name, and where the Hub cannot be reached, give "
        "--base-model the directory of the model"
    )
    layers = (
        f"{tmp_path}/config.json cannot be used: Class validation error for validator 'validate_layer_type': ValueError: "
        "`num_hidden_layers` (3) must be equal to the number of `layer_types` (1); download it again, or name another model"
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}')
    for source, message in (("org/model", unreachable), (str(tmp_path), layers)):
        with pytest.raises(ConfigError) as raised:
            read_config(source)
        assert str(raised.value) == message


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gemma3", {}, "image models of type 'gemma3' are not supported; supported are qwen2_5_vl, qwen3_vl, qwen3_5"),
        ("gemma4", {}, "image models of type 'gemma4' are not supported; supported are qwen2_5_vl, qwen3_vl, qwen3_5"),
        ("gemma4_text", {}, "the layers of 'gemma4_text' are not supported: 'head_dim' is a per-layer attribute and may vary"),
        ("glm4v", {}, "image models of type 'glm4v' are not supported; supported are qwen2_5_vl, qwen3_vl, qwen3_5"),
        ("olmo_hybrid", {}, "layers of type linear_attention are not supported for 'olmo_hybrid'; supported are full_attention, sliding_"),
        ("qwen3_next", {}, r"'qwen3_next' is a mixture of experts \(num_experts=512\)"),
        ("xlstm", {}, "the layers of 'xlstm' are not supported: 'xLSTMConfig' object has no attribute 'num_attention_heads'"),
        ("t5", {}, "'t5' has an encoder"),
        ("mixtral", {}, r"'mixtral' is a mixture of experts \(num_(local_)?experts=8\)"),
        ("mamba", {}, "layers of type linear_attention are not supported for 'mamba'; supported are full_attention, sliding_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary type 'dynamic' changes with"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}},
            "rotary type 'dynamic' changes with",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_its_configuration(model_type: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"folder: .*{reason}"):
        family_of("folder", AutoConfig.for_model(model_type, **settings))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "no attention linear that LoRA can train; known are q_proj, .*, found lm_head|no linear layer at all"),
        ("phi", r"its output projection is Linear\(.*bias=True\); Tinsmith needs a linear layer without a bias"),
    ],
)
def test_what_cannot_work_is_refused_by_its_layers(model_type: str, reason: str, tmp_path: Path) -> None:
    write_decoder(model_type, tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        pick_device("tpu")
    remedy = r"name one of cuda:0 to cuda:\d+, or" if torch.cuda.is_available() else "leave --device out, or use --device cpu$"
    with pytest.raises(ConfigError, match=rf"^device='cuda:99': .*{remedy}"):
        pick_device("cuda:99")


def test_a_context_beyond_the_models_own_is_refused(family_dir: Callable[[str], Path]) -> None:
    """Also where its sizes alone are asked for."""
    source = str(family_dir("qwen3"))
    limit = json.loads((family_dir("qwen3") / "config.json").read_text())["max_position_embeddings"]
    assert [size_of(source, ModelsConfig(max_context=wanted)).max_context for wanted in (0, 77)] == [limit, 77]
    assert load(family_dir("qwen3"), max_context=77).max_context == 77
    with pytest.raises(ConfigError, match=f"max_context={limit + 1} is more than .* was built for: {limit} tokens"):
        size_of(source, ModelsConfig(max_context=limit + 1))
    with pytest.raises(ConfigError, match=f"max_context={limit + 1} is more than tiny was built for"):
        load(family_dir("qwen3"), max_context=limit + 1)


def test_weights_that_the_files_lack_are_never_made_at_random(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    lost = min(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"model: its weights lack {re.escape(lost)}, which a qwen3 of its config.json has;"):
        load(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"intermediate_size": 80},
            r"its weights hold \S+down_proj.weight of shape \[64, \d+\], and a qwen3 of its config.json has \[64, 80\];",
        ),
        ({"tie_word_embeddings": False}, "its weights lack lm_head.weight, which a qwen3 of its config.json has;"),
    ],
)
def test_a_configuration_of_other_weights_is_named_with_a_remedy(
    settings: dict[str, Any], message: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | settings))
    with pytest.raises(ConfigError, match=message) as refused:
        load(model)
    assert "\n" not in str(refused.value)


def test_pickled_garbage_is_named_with_a_remedy(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match=r"model: transformers cannot load it as a decoder: .*; download config.json and weights"):
        load(model)


def test_a_network_that_cannot_be_made_is_named_with_a_remedy(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    for damage in ({"num_attention_heads": 0, "head_dim": None}, {"hidden_size": -1}, {"hidden_act": "none at all"}):
        (model / "config.json").write_text(json.dumps(config | damage))
        with pytest.raises(ConfigError, match=f"^{model}(/config.json cannot be used)?: .*; "):
            size_of(str(model), ModelsConfig())


def test_code_of_a_model_is_never_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does anybody ask whether to run it."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = {"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"it needs code of its own \(own.py\), which is not run; name another model$"):
        read_config(str(tmp_path))
    assert not ran.exists()
    assert "[y/N]" not in capfd.readouterr().out


def test_files_that_the_libraries_cannot_use_are_named(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir("qwen3_vl"), tmp_path / "model"))
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}}))
    with pytest.raises(ConfigError, match=r"model: its tokenizer cannot be loaded: .*; copy that of the model"):
        load(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="model has no tokenizer"):
        load(model)
    (model / "preprocessor_config.json").write_text(json.dumps({"size": "large", "patch_size": [], "image_mean": {}}))
    with pytest.raises(ConfigError, match=r"its image processor, .*, does not compute what .* \(\w+Error: .*\); copy that"):
        LocalProcessor(str(model))
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "wide", "layer_types": 7}))
    with pytest.raises(ConfigError, match=r"model/config\.json cannot be used: "):
        read_config(str(model))
