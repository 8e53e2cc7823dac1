"""Writes GGUF files, which llama.cpp and Ollama read: a LoRA adapter, or a whole model with its tokenizer.

Both are made of what an export has written: a PEFT adapter or a transformers model. Names of tensors and keys are those
of the package `gguf`. Architectures are listed here once a test has compared what llama.cpp computes; others are
refused, because a tensor in a wrong order changes the answers without an error.

llama.cpp rotates the queries and keys of `llama` in neighbouring pairs, transformers in two halves: their rows are put
into that order, also those of an adapter's B.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from tinsmith.errors import ConfigError, UserError
from tinsmith.models.files import read_object, safetensors_files

if TYPE_CHECKING:
    from gguf import GGUFWriter

ADAPTER, MODEL = "adapter.gguf", "model.gguf"
"""Names of the files."""

_PROVEN = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
"""llama.cpp's names of the model types whose files a test has compared with it."""
_PAIRED = {"llama"}
"""Model types whose queries and keys llama.cpp rotates in neighbouring pairs."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRETOKENIZERS = {
    rf"{_WORDS}|\p{{N}}|{_OTHERS}": "qwen2",
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}": "llama-bpe",
}
"""llama.cpp's names of the ways to split a text before byte pairs are merged, by their regular expression."""


def require_gguf(model_type: str) -> None:
    """Raise ConfigError for an architecture that is not proven."""
    if model_type not in _PROVEN:
        raise ConfigError(
            f"--gguf is not proven for {model_type}, only for {', '.join(_PROVEN)}; leave it out, and convert the "
            "export with the tools of llama.cpp"
        )


@dataclass(frozen=True)
class _Shape:
    """The part of a model's configuration on which its files depend."""

    model_type: str
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    values: Mapping[str, Any]
    """The whole configuration."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "_Shape":
        """Read a config.json. Raises UserError for what llama.cpp would compute in another way."""
        model_type, heads = str(config.get("model_type")), int(config["num_attention_heads"])
        require_gguf(model_type)
        if config.get("use_sliding_window") or (model_type == "llama" and config.get("sliding_window")):
            raise UserError("--gguf is not proven for a model that attends within a sliding window; leave it out")
        if set(config.get("layer_types") or ()) - {"full_attention"}:
            raise UserError("--gguf is not proven for a model that attends within a sliding window; leave it out")
        for name, proven in (("hidden_act", "silu"), ("partial_rotary_factor", 1), ("mlp_bias", False)):
            if (found := config.get(name, _rope(config).get(name, proven))) != proven:
                raise UserError(f"--gguf is proven for {name}={proven}, not for {found!r}; leave it out")
        kind = _rope(config).get("rope_type") or _rope(config).get("type") or "default"  # older files have `type`
        if kind not in ("default", "llama3"):
            raise UserError(f"--gguf is proven for rope_type default and llama3, not for {kind!r}; leave it out")
        return cls(
            model_type,
            int(config["num_hidden_layers"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or config["hidden_size"] // heads),
            config,
        )

    def in_order(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the layer of that name, whose rows are its outputs, as llama.cpp reads it."""
        layer = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if self.model_type not in _PAIRED or layer not in ("q_proj", "k_proj"):
            return tensor
        heads = self.heads if layer == "q_proj" else self.key_heads
        # [heads * 2 * half, ...] -> [heads * half * 2, ...]
        paired: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        return paired


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the rotary positions, which older configurations have in two places."""
    old = {"rope_theta": config.get("rope_theta", 1e4)} | (config.get("rope_scaling") or {})
    found: Mapping[str, Any] = config.get("rope_parameters") or old
    return found


def write_adapter_gguf(peft: Path, base: Mapping[str, Any], name: str, directory: Path) -> None:
    """Write the PEFT adapter in `peft` as adapter.gguf; `base` is the config.json of its base model.

    Raises UserError for an adapter that llama.cpp cannot apply.
    """
    shape = _Shape.read(base)
    from gguf import MODEL_ARCH_NAMES, GGUFType, GGUFWriter, Keys, get_tensor_name_map

    config = read_object(peft / "adapter_config.json")
    if config.get("rank_pattern") or config.get("target_parameters"):
        raise UserError("--gguf: llama.cpp takes adapters of one rank on whole layers; add --merge")
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == _PROVEN[shape.model_type])
    names = get_tensor_name_map(architecture, shape.layers)
    writer = GGUFWriter(directory / ADAPTER, _PROVEN[shape.model_type])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    writer.add_name(name)
    for key, tensor in _tensors([peft / "adapter_model.safetensors"]):
        layer, _, matrix = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if layer == "lm_head" and base.get("tie_word_embeddings"):
            raise UserError(
                "--gguf: the adapter trains the output projection, which this base shares with its embedding, and "
                "llama.cpp has no place for it; add --merge, or train with train_unembed=False"
            )
        found = names.get_name(layer)
        if found is None:
            raise UserError(f"--gguf: llama.cpp knows no layer {layer} of {shape.model_type}; add --merge")
        rows = shape.in_order(layer, tensor) if matrix == "lora_B" else tensor
        writer.add_tensor(f"{found}.weight.{matrix.lower()}", rows.float().numpy())
    _finish(writer)


def write_model_gguf(model: Path, name: str, directory: Path) -> None:
    """Write the transformers model in `model` as model.gguf, with its tokenizer, in the precision of its files.

    Raises UserError for a tokenizer that is not proven.
    """
    config = read_object(model / "config.json")
    shape = _Shape.read(config)
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFType, GGUFWriter, get_tensor_name_map

    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == _PROVEN[shape.model_type])
    names = get_tensor_name_map(architecture, shape.layers)
    writer = GGUFWriter(directory / MODEL, _PROVEN[shape.model_type])
    writer.add_type(GGUFType.MODEL)
    writer.add_name(name)
    _add_sizes(writer, shape)
    _add_tokenizer(writer, model, int(config["vocab_size"]))
    if _rope(config).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(_rope(config), shape.head_dim))
    for key, tensor in _tensors(safetensors_files(model)):
        layer, _, ending = key.rpartition(".")
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = names.get_name(layer)
        if found is None:
            raise UserError(f"--gguf: llama.cpp knows no {key} of {shape.model_type}; leave --gguf out")
        ordered = shape.in_order(key, tensor)
        if ordered.dtype == torch.bfloat16 and ordered.dim() > 1:
            raw = ordered.view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(f"{found}.{ending}", raw, raw_dtype=GGMLQuantizationType.BF16)
        else:
            kept = ordered if ordered.dtype == torch.float16 and ordered.dim() > 1 else ordered.float()
            writer.add_tensor(f"{found}.{ending}", kept.numpy())
    _finish(writer)


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dictionary
                yield key, opened.get_tensor(key)


def _finish(writer: "GGUFWriter") -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: "GGUFWriter", shape: _Shape) -> None:
    values = shape.values
    writer.add_context_length(int(values["max_position_embeddings"]))
    writer.add_embedding_length(int(values["hidden_size"]))
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(int(values["intermediate_size"]))
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(_rope(values).get("rope_theta", 1e4)))
    writer.add_layer_norm_rms_eps(float(values["rms_norm_eps"]))
    writer.add_vocab_size(int(values["vocab_size"]))


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return the divisors of the frequencies: 1 for high ones, `factor` for low ones, in between a mixture."""
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    frequencies = float(rope["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = int(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)  # within the first context
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (share + (1 - share) / factor)).astype(np.float32)


def _add_tokenizer(writer: "GGUFWriter", model: Path, size: int) -> None:
    from gguf import SpecialVocab, TokenType

    tokenizer = read_object(model / "tokenizer.json")
    kind = tokenizer.get("model", {}).get("type")
    pretokenizer = _PRETOKENIZERS.get(_split(tokenizer))
    if kind != "BPE" or pretokenizer is None:
        raise UserError(f"--gguf is not proven for the tokenizer of this model ({kind}); leave --merge or --gguf out")
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [TokenType.UNUSED] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pretokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = SpecialVocab(model, load_merges=True, n_vocab=size)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _split(tokenizer: Mapping[str, Any]) -> str:
    """The regular expression by which a tokenizer splits texts, or ""."""
    steps = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers", [])
    return next((step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"), "")


def write_modelfile(directory: Path, base_name: str, merged: bool) -> None:
    """Write Ollama's Modelfile for the GGUF file in `directory`."""
    if merged:
        text = f"# ollama create NAME -f Modelfile\nFROM ./{MODEL}\n"
    else:
        text = (
            f"# base.gguf is {base_name} in GGUF: name that file, or the base in Ollama's library.\n"
            f"# Then: ollama create NAME -f Modelfile\nFROM ./base.gguf\nADAPTER ./{ADAPTER}\n"
        )
    (directory / "Modelfile").write_text(text)
