"""Writes the model card of an export: a README.md with what the hub, vLLM and a reader want to know."""

import re
import shlex
import time
from pathlib import Path

import yaml

from tinsmith import __version__
from tinsmith.models.lora import LORA_ALPHA
from tinsmith.store.records import Checkpoint
from tinsmith.training.checkpoint import About


def model_card(checkpoint: Checkpoint, about: About, base_name: str, base: Path | None, merge: bool, gguf: bool) -> str:
    """The text of a README.md; `base` is the directory of the base model, if it is on this machine."""
    licence = _licence_of(base)
    # An absolute path is no name at the hub, which refuses a card with it
    named = {} if Path(base_name).is_absolute() else {"base_model": base_name}
    if named and about.shape.rank:
        named["base_model_relation"] = "merge" if merge else "adapter"
    front = {
        **named,
        **({"license": licence} if licence else {}),
        "library_name": "gguf" if gguf else "transformers" if merge else "peft",
        "tags": ["tinsmith", *(["lora"] if about.shape.rank and not merge else [])],
    }
    rows = {
        "base model": f"`{base_name}`",
        "license of the base": licence or "not in its files: look at the base model",
        "trained": _trained(about),
        "checkpoint": f"`{checkpoint.tinker_path}`, saved {_day(checkpoint.created_at)}",
        "written by": f"Tinsmith {__version__}",
    }
    if about.base_fingerprint:
        rows["fingerprint of the base's weights"] = f"`{about.base_fingerprint}`"
    # What a client has written about its run
    rows |= {f"{_cell(key)} (run)": _cell(value) for key, value in (checkpoint.user_metadata or {}).items()}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {_cell(checkpoint.name)}\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Use\n\n```\n{_use(about, base_name, merge, gguf)}\n```\n"
    )


def _trained(about: About) -> str:
    shape = about.shape
    if not shape.rank:
        return "all parameters"
    parts = {"attention": shape.train_attn, "MLP": shape.train_mlp, "output projection": shape.train_unembed}
    layers = ", ".join(part for part, trained in parts.items() if trained)
    return f"LoRA of rank {shape.rank}, alpha {LORA_ALPHA:g}, seed {shape.seed}, on: {layers}"


def _use(about: About, base_name: str, merge: bool, gguf: bool) -> str:
    if gguf:
        model = "-m model.gguf" if merge else "-m BASE.gguf --lora adapter.gguf"
        return f"llama-server {model}\nollama create NAME -f Modelfile"
    if merge:
        return "vllm serve DIR"
    rank = about.shape.rank
    return f"vllm serve {shlex.quote(base_name)} --enable-lora --max-lora-rank {rank} --lora-modules NAME=DIR"


def _licence_of(base: Path | None) -> str:
    """The licence that the base's own card names, or ""."""
    card = base / "README.md" if base is not None else None
    if card is None or not card.is_file():
        return ""
    front = re.match(r"---\n(.*?)\n---\s", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:[ \t]*([\w.+-]+)[ \t]*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else ""


def _cell(text: str) -> str:
    """A client's text as a part of a line of Markdown, without its signs."""
    return re.sub(r"([\\`*_{}\[\]<>()#|!])", r"\\\1", " ".join(str(text).split()))


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
