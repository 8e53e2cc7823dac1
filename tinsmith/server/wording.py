"""The wording of errors for clients, which are not told of the server's directories."""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tinsmith.config import Config
from tinsmith.server.base_models import BaseModels

_PLACES = ("_HOME", "_CACHE", "_DIR")
"""Suffixes of environment variables that hold a directory."""


class Wording:
    """The wording of errors for clients."""

    def __init__(self, config: Config, data_dir: Path, base_models: BaseModels) -> None:
        self._places = private_places(config, data_dir)
        self._base_models = base_models

    def __call__(self, reason: str, category: str | None = None) -> str:
        """The text without the server's directories, unless it is the client's own ("user")."""
        return reason if category == "user" else without_paths(reason, self._places | self._base_models.directories())


def private_places(config: Config, data_dir: Path) -> dict[str, str]:
    """Directories that clients are not told of, each with what they read instead."""
    named = [(sys.prefix, "PYTHON"), (sys.base_prefix, "PYTHON"), (str(Path(__file__).parents[2]), "TINSMITH")]
    with suppress(OSError):  # it may be deleted
        named.append((str(Path.cwd()), "."))
    with suppress(RuntimeError):  # a container may run as a user without a home
        named.append((str(Path.home()), "~"))
    named.append((tempfile.gettempdir(), "TMPDIR"))
    # HF_HOME, XDG_CACHE_HOME, TRITON_CACHE_DIR, ...
    named += [(os.environ[name], name) for name in os.environ if name.endswith(_PLACES)]
    named += [
        (config.vllm.vllm_dir, "VLLM_DIR"),
        (config.checkpoint_root, "CHECKPOINT_ROOT"),
        (str(data_dir), "DATA_DIR"),
    ]
    paths = [(Path(place).expanduser(), word) for place, word in named if place and "://" not in place]
    return {str(each): word for path, word in paths for each in (path.absolute(), path.resolve())}


def without_paths(text: str, places: Mapping[str, str]) -> str:
    """`text` with the words of `places` in the place of these directories."""
    longest_first = sorted((place for place in places if place.strip("/")), key=len, reverse=True)
    # After file:// too, and at the end of a sentence
    begins, ends = r"(?:(?<![\w/.-])|(?<=://)|(?<=:///))", r"(?![\w-]|\.+[\w-])"
    pattern = rf"{begins}(?:{'|'.join(map(re.escape, longest_first))}){ends}"
    return re.sub(pattern, lambda found: places[found[0]], text) if longest_first else text
