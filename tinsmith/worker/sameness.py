"""Checks that workers on several hosts run the same programs and hold the same weights."""

import platform
from collections.abc import Mapping

import torch
import transformers

from tinsmith import __version__
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel


def require_same(group: ProcessGroup, bases: Mapping[str, BaseModel]) -> None:
    """Raise ConfigError on all workers, naming what differs and where, if they have not all the same programs and base models.

    Replicas of different weights would train something that no single worker has. To be called by all.
    """
    hosts = group.texts(group.place.host)
    versions = {
        "Tinsmith": __version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "transformers": transformers.__version__,
    }
    here = versions | {f"the weights of {name}": base.fingerprint for name, base in bases.items()}
    for what, own in here.items():
        found = group.texts(own)
        if len(set(found)) > 1:
            told = ", ".join(f"{each} on {host}" for host, each in dict(zip(hosts, found, strict=True)).items())
            raise ConfigError(f"workers on several hosts need the same of all that computes, but {what} differs: {told}; install the same")
