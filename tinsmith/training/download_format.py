"""Writes adapters as clients download them, with names that the cookbook's `weights` tools turn into PEFT's.

The tools look at the names in the files of the base model. Where those begin with `model.language_model.`, as in Qwen3-VL and Qwen3.5, the
tools put `language_model.` behind every `model.`, so an adapter must leave it out. There queries, keys and values of a gated delta net are
adapters of their own on `in_proj_q`, `in_proj_k` and `in_proj_v`, which the tools add to their rows of `in_proj_qkv`. Everywhere else they
keep the names, and the file is the one that PEFT loads directly. The output projection is always `lm_head`. The tools also know it as
`model.unembed_tokens`; but where the base has no output projection of its own they would take that for the embedding of the input.
"""

from collections.abc import Iterator
from pathlib import Path

from tinsmith.models.files import local_directory, read_header, safetensors_files
from tinsmith.models.layout import LM_HEAD, Layout
from tinsmith.models.lora import Adapter
from tinsmith.training.peft_format import write_adapter, write_peft

_STORED_PREFIX = "model.language_model."
"""Prefix of names in base models for which the download tools rename tensors."""


def write_download(adapter: Adapter, base: Layout, source: str, label: str, directory: Path) -> None:
    """Write an adapter for download, created if it is not there.

    `source` is where the files of the base model are; `label` is what `adapter_config.json` calls it.
    """
    if not any(name.startswith(_STORED_PREFIX) for name in _stored_names(source)):
        write_peft(adapter, base, label, directory)
        return
    names = {name: name if name == LM_HEAD else f"model.{base.name_apart(name)}" for name in adapter.masters}
    targets = list(names.values())
    if len(names) > 1 and LM_HEAD in names:
        # PEFT refuses an adapter if it finds no target, but drops the others without a word if it finds one.
        targets.remove(LM_HEAD)
    write_adapter(adapter.masters, adapter.shape.rank, names, targets, label, directory)


def _stored_names(source: str) -> Iterator[str]:
    """The names of the tensors in the safetensors files of a model; none if it has no such files."""
    directory = local_directory(source)
    for path in safetensors_files(directory) if directory is not None else []:
        yield from read_header(path)[1]
