"""Positions against transformers' own, and what is refused."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.bases import image_chunks, load, random_tokens, renderer, write_decoder
from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.memory.sizing import size_of
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.families import IMAGE_FAMILIES, family_of, read_config
from tinsmith.rendering.processor import LocalProcessor


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_positions_equal_transformers(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    chunks = [
        *image_chunks(base, 1, 5, width=64, height=160),
        *image_chunks(base, 3, 4, width=224, height=32),
        random_tokens(9, 3),
    ]
    rendered = renderer(base).render(chunks)
    ids = torch.from_numpy(rendered.token_ids).long().unsqueeze(0)
    grids = torch.tensor([image.grid_thw for image in rendered.images])
    expected, delta = base.network.model.get_rope_index(
        ids, (ids == base.config.image_token_id).int(), image_grid_thw=grids
    )
    assert torch.equal(rendered.positions, expected[:, 0])
    assert rendered.next_position == len(rendered) + delta.item()


def test_layers_for_speculation_are_left_out(
    family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel], tmp_path: Path
) -> None:
    """Checkpoints of Qwen3.5 hold weights of a layer that guesses several tokens (`mtp.`), which the model itself does
    not use."""
    shutil.copytree(family_dir("qwen3_5"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors") | {
        "mtp.fc.weight": torch.ones(64, 128),
        "mtp.norm.weight": torch.ones(64),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    damage_config(tmp_path, text_config=config["text_config"] | {"mtp_num_hidden_layers": 1})
    base, plain = load(tmp_path), family_base("qwen3_5")
    assert base.layout == plain.layout
    found, expected = base.network.state_dict(), plain.network.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}'
    )
    for source, message in (
        (
            "org/model",
            "the model's configuration cannot be read: We couldn't .* give --base-model the directory of the model$",
        ),
        (
            str(tmp_path),
            (
                r"/config.json cannot be used: .* \(3\) must be equal to .* `layer_types` \(1\); "
                r"download it again, or name"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{source}.*{message}"):
            read_config(source)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "gemma3",
            {},
            (
                "image models of type 'gemma3' are not supported; "
                "supported are qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe$"
            ),
        ),
        (
            "gemma4_text",
            {},
            "the layers of 'gemma4_text' are not supported: 'head_dim' is a per-layer attribute and may vary",
        ),
        (
            "olmo_hybrid",
            {},
            (
                "layers of type linear_attention are not supported for 'olmo_hybrid'; "
                "supported are full_attention, sliding_"
            ),
        ),
        ("qwen3_next", {}, r"'qwen3_next' is a mixture of experts \(num_experts=512\)"),
        (
            "xlstm",
            {},
            "the layers of 'xlstm' are not supported: 'xLSTMConfig' object has no attribute 'num_attention_heads'",
        ),
        ("t5", {}, "'t5' has an encoder"),
        ("olmoe", {}, r"'olmoe' is a mixture of experts \(num_experts=64\)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary type 'dynamic' changes with",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_its_configuration(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"folder: .*{reason}"):
        family_of("folder", AutoConfig.for_model(model_type, **settings))


def test_an_output_projection_with_a_bias_is_refused(tmp_path: Path) -> None:
    write_decoder("phi", tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"its output projection is Linear\(.*bias=True\); Tinsmith needs a linear layer without a bias",
    ):
        load(tmp_path)


def test_a_device_that_is_not_there_is_refused() -> None:
    remedy = (
        r"name one of cuda:0 to cuda:\d+, or"
        if torch.cuda.is_available()
        else "leave --device out, or use --device cpu$"
    )
    for device, message in (("tpu", "use auto, cpu, cuda or cuda:N"), ("cuda:99", rf"^device='cuda:99': .*{remedy}")):
        with pytest.raises(ConfigError, match=message):
            pick_device(device)


def test_a_context_beyond_the_models_own_is_refused(family_dir: Callable[[str], Path]) -> None:
    """Also where its sizes alone are asked for."""
    source = str(family_dir("qwen3"))
    limit = json.loads((family_dir("qwen3") / "config.json").read_text())["max_position_embeddings"]
    assert (
        load(family_dir("qwen3"), max_context=77).max_context
        == size_of(source, ModelsConfig(max_context=77)).max_context
        == 77
    )
    for read in (
        lambda wanted: size_of(source, ModelsConfig(max_context=wanted)),
        lambda wanted: load(family_dir("qwen3"), max_context=wanted),
    ):
        assert read(0).max_context == limit
        with pytest.raises(ConfigError, match=f"max_context={limit + 1} is more than .* was built for"):
            read(limit + 1)


def damage_config(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))


def lose_a_weight(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def pickle_garbage(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (
        lose_a_weight,
        r": its weights lack model\.layers\.0\.mlp\.up_proj\.weight, which a qwen3 of its config.json has;",
    ),
    (
        partial(damage_config, intermediate_size=80),
        r": its weights hold \S+down_proj.weight of shape \[64, \d+\], and a qwen3 of its",
    ),
    (
        partial(damage_config, tie_word_embeddings=False),
        ": its weights lack lm_head.weight, which a qwen3 of its config.json has;",
    ),
    (pickle_garbage, ": transformers cannot load it as a decoder: .*; download config.json and weights"),
    (partial(damage_config, num_attention_heads=0, head_dim=None), "(/config.json cannot be used)?: .*; "),
    (partial(damage_config, hidden_act="none at all"), "(/config.json cannot be used)?: .*; "),
    (partial(damage_config, hidden_size="wide", layer_types=7), "/config.json cannot be used: "),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_weights_that_are_not_those_of_the_configuration_are_never_made_at_random(
    damage: Callable[[Path], Any], message: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nor does anything else of a network that cannot be made end in more than a line with a remedy."""
    model = Path(shutil.copytree(family_dir("qwen3"), tmp_path / "model"))
    damage(model)
    with pytest.raises(ConfigError, match=f"model{message}") as refused:
        load(model)
    assert "\n" not in str(refused.value)


def test_code_of_a_model_is_never_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does anybody ask whether to run it."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = {"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"it needs code of its own \(own.py\), which is not run; name another model$"
    ):
        read_config(str(tmp_path))
    assert not ran.exists()
    assert "[y/N]" not in capfd.readouterr().out


def test_files_that_the_libraries_cannot_use_are_named(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(family_dir("qwen3_vl"), tmp_path / "model"))
    (model / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}})
    )
    with pytest.raises(ConfigError, match=r"model: its tokenizer cannot be loaded: .*; copy that of the model"):
        load(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="model has no tokenizer"):
        load(model)
    (model / "preprocessor_config.json").write_text(json.dumps({"size": "large", "patch_size": [], "image_mean": {}}))
    with pytest.raises(
        ConfigError, match=r"its image processor, .*, does not compute what .* \(\w+Error: .*\); copy that"
    ):
        LocalProcessor(str(model))
