"""`tinsmith export` and `tinsmith import`: between the checkpoints of a data directory and the formats of PEFT and transformers.

Both work beside a running server: the files of a checkpoint are written once and never changed.
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from tinsmith.config import Config, base_model_sources
from tinsmith.engine.checkpoints import CHECKPOINTS_DIR, Checkpoints, describe
from tinsmith.errors import ConfigError, UserError
from tinsmith.store.database import FILE_NAME
from tinsmith.store.store import Store
from tinsmith.training.checkpoint import About, read_about, stored_adapter, write_checkpoint
from tinsmith.training.peft_format import outline, read_peft, write_merged, write_peft
from tinsmith.wire.paths import CheckpointKind, CheckpointPath, check_name, parse_path

IMPORTED = "imported"
"""What stands in the place of the model id in the path of a checkpoint that was trained elsewhere."""


def export_checkpoint(data_dir: Path, path: str, directory: Path, merge: bool, base_source: str | None) -> None:
    """Write a checkpoint as a PEFT adapter, or merged into its base as a transformers model.

    `base_source` is where the base model is now, if it is not where the checkpoint was trained. Raises TinsmithError: no such checkpoint,
    `directory` is in use, another base model.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name a new directory")
    with _opened(data_dir) as checkpoints:
        _, files = checkpoints.find(path, parse_path(path).kind)
        about = read_about(files)
        source = base_source or about.base_source
        base = outline(source)
        if base.architecture != about.architecture:
            raise UserError(f"{source} is of architecture {base.architecture}; {path} was saved for {about.architecture}")
        adapter = stored_adapter(files, about)
    (write_merged if merge else write_peft)(adapter, base, source, directory)


def import_adapter(data_dir: Path, adapter_dir: Path, name: str, base_model: str) -> list[str]:
    """Make a checkpoint for training and one for sampling of a PEFT adapter; returns their paths.

    `base_model` is [NAME=]PATH_OR_HUB_ID, as the server is given it. Raises TinsmithError: not a LoRA adapter of that base, name taken.
    """
    check_name(name)
    ((base_name, source),) = base_model_sources(Config(base_models=[base_model])).items()
    base = outline(source)
    adapter = read_peft(adapter_dir, base)
    about = About(base_name, source, base.architecture, adapter.shape)
    kinds: tuple[CheckpointKind, ...] = ("training", "sampler")
    paths = [CheckpointPath(IMPORTED, kind, name) for kind in kinds]
    with _opened(data_dir) as checkpoints:
        for path in paths:
            if checkpoints.store.checkpoint(str(path)) is not None:
                raise UserError(f"{path} exists already; use another name")
        for path in paths:
            files = checkpoints.root / uuid.uuid4().hex
            write_checkpoint(files, about, adapter)
            checkpoints.store.put_checkpoint(describe(path, files, None, None))
    return [str(path) for path in paths]


@contextlib.contextmanager
def _opened(data_dir: Path) -> Iterator[Checkpoints]:
    if not (data_dir / FILE_NAME).is_file():
        raise ConfigError(f"data_dir={data_dir} holds no data of a server (there is no {FILE_NAME} in it)")
    with contextlib.closing(Store.open(data_dir)) as store:
        yield Checkpoints(store, data_dir / CHECKPOINTS_DIR)
