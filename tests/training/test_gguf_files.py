"""GGUF files, as the package `gguf` and llama.cpp itself read them.

Invariant: A GGUF file that is written has the base's and the adapter's numbers, and llama.cpp computes with it what
transformers does; architectures for which no test has shown this are refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xllamacpp
from gguf import GGUFReader
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bases import random_adapter
from tinsmith.errors import ConfigError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.training.gguf_files import ADAPTER, MODEL, require_gguf, write_adapter_gguf, write_model_gguf
from tinsmith.training.peft_format import write_merged, write_peft

FAMILIES = ("qwen2", "qwen3", "llama")
TEXT = "Tinsmiths mend 12345 kettles, don't they?\n\n  Yes: it's a trade."
CLOSE = 2e-3
"""Most that log-probabilities may differ: llama.cpp adds up in another order, and some values in 16 bits."""


def write_base(family: str, family_dir: Callable[[str], Path], target: Path) -> Path:
    """A base model of a family; one of Llama with the tokenizer of Llama 3."""
    source = family_dir(family)
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if family == "llama":
        tokenizer = (target / "tokenizer.json").read_text().replace(r"\\p{N}| ?[", r"\\p{N}{1,3}| ?[")
        assert r"\\p{N}{1,3}" in tokenizer
        changed = json.loads(tokenizer)
        changed["model"]["ignore_merges"] = True
        (target / "tokenizer.json").write_text(json.dumps(changed))
    return target


def top_logprobs(model: Path, prompt: str | list[int], adapter: Path | None = None) -> dict[int, float]:
    """The 20 most probable next tokens, as llama.cpp computes them."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(model), 256, 1, False
    options.verbosity, options.cpuparams.n_threads, options.cpuparams_batch.n_threads = -1, 1, 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter is not None:
        options.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(options)
    reply: Any = server.handle_completions({"prompt": prompt, "max_tokens": 1, "logprobs": 20, "temperature": 0.0})
    return {entry["id"]: entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


@torch.no_grad()
def expected(network: Any, tokens: list[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = network.eval()(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).numpy()
    return logits


def without_head(base: BaseModel) -> Adapter:
    """An adapter that leaves the output projection as it is, because the base may share it with its embedding."""
    return random_adapter(base, rank=8, train_unembed=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_transformers_does(
    family: str, family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a merged model, from a text too, and with an adapter beside its base."""
    base, source = family_base(family), write_base(family, family_dir, tmp_path / "base")
    adapter = without_head(base)
    write_merged(adapter, base.layout, str(source), tmp_path / "merged")
    write_peft(adapter, base.layout, "base", tmp_path / "peft")
    for directory in ("of base", "of merged"):
        (tmp_path / directory).mkdir()
    write_model_gguf(source, "base", tmp_path / "of base")
    write_model_gguf(tmp_path / "merged", "merged", tmp_path / "of merged")
    write_adapter_gguf(tmp_path / "peft", json.loads((source / "config.json").read_text()), "adapter", tmp_path)
    tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    plain = expected(network, tokens)
    trained = expected(PeftModel.from_pretrained(network, str(tmp_path / "peft")), tokens)
    assert np.abs(plain - trained).max() > 100 * CLOSE
    for found, right in (
        (top_logprobs(tmp_path / "of base" / MODEL, tokens), plain),
        (top_logprobs(tmp_path / "of merged" / MODEL, tokens), trained),
        (top_logprobs(tmp_path / "of merged" / MODEL, TEXT), trained),
        (top_logprobs(tmp_path / "of base" / MODEL, tokens, tmp_path / ADAPTER), trained),
    ):
        assert len(found) == 20
        assert max(abs(right[token] - value) for token, value in found.items()) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_comes_back(
    family: str, family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Bit for bit; of Llama, the rows of queries and keys in the order in which llama.cpp rotates them."""
    source = family_dir(family)
    config = json.loads((source / "config.json").read_text())
    write_peft(without_head(family_base(family)), family_base(family).layout, "base", tmp_path)
    write_adapter_gguf(tmp_path, config, "adapter", tmp_path)
    write_model_gguf(source, "model", tmp_path)
    short = {"self_attn": "attn", "mlp": "ffn", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}
    short |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    readers = [GGUFReader(tmp_path / name) for name in (ADAPTER, MODEL)]
    written = {tensor.name: tensor.data for reader in readers for tensor in reader.tensors}
    compared = 0
    for file in (source / "model.safetensors", tmp_path / "adapter_model.safetensors"):
        for name, tensor in load_file(file).items():
            parts = name.removeprefix("base_model.model.").split(".")
            if parts[1] != "layers" or parts[4] not in short:
                continue
            ending = f"weight.{parts[5].lower()}" if parts[5].startswith("lora") else parts[5]
            right = tensor.numpy()
            if family == "llama" and parts[4] in ("q_proj", "k_proj") and parts[5] != "lora_A":
                heads = config["num_attention_heads" if parts[4] == "q_proj" else "num_key_value_heads"]
                halves = right.reshape(heads, 2, -1, right.shape[-1])
                right = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(right.shape)
            found = written[f"blk.{parts[2]}.{short[parts[3]]}_{short[parts[4]]}.{ending}"]
            assert np.array_equal(found, right), name
            compared += 1
    assert compared >= 2 * 7 * 3


def test_bfloat16_stays_bfloat16(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Norms are float32: llama.cpp asks for that."""
    network = AutoModelForCausalLM.from_pretrained(family_dir("qwen3"), dtype=torch.bfloat16)
    source = write_base("qwen3", family_dir, tmp_path / "base")
    network.save_pretrained(source)
    write_model_gguf(source, "model", tmp_path)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / MODEL).tensors}
    assert {tensors[name].tensor_type.name for name in ("token_embd.weight", "blk.0.ffn_up.weight")} == {"BF16"}
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    found = top_logprobs(tmp_path / MODEL, tokens)
    right = expected(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), tokens)
    assert max(abs(right[token] - value) for token, value in found.items()) < 0.1  # llama.cpp rounds inputs, too


def test_what_is_not_proven_is_refused(
    family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--gguf is not proven for gemma2, only for qwen2, qwen3, llama; leave it"):
        require_gguf("gemma2")
    base, source = family_base("qwen3"), write_base("qwen3", family_dir, tmp_path / "base")
    config = json.loads((source / "config.json").read_text())
    write_peft(random_adapter(base), base.layout, "base", tmp_path / "peft")
    with pytest.raises(UserError, match=r"which this base shares with its embedding.* add --merge, or train with"):
        write_adapter_gguf(tmp_path / "peft", config | {"tie_word_embeddings": True}, "adapter", tmp_path)
    for changed, why in (
        ({"use_sliding_window": True}, "within a sliding window"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"]}, "within a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type default and llama3, not for 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "default and llama3, not for 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "proven for partial_rotary_factor=1, not for 0.5"),
        ({"hidden_act": "gelu"}, "proven for hidden_act=silu, not for 'gelu'"),
    ):
        with pytest.raises(UserError, match=why):
            write_adapter_gguf(tmp_path / "peft", config | changed, "adapter", tmp_path)
    tokenizer = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(tokenizer.replace(r"\\p{N}| ?[", r"\\p{N}+| ?["))
    with pytest.raises(UserError, match=r"--gguf is not proven for the tokenizer of this model \(BPE\)"):
        write_model_gguf(source, "model", tmp_path)
