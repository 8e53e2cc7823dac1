"""`tinsmith export` and `tinsmith import`: checkpoints to and from PEFT and transformers, beside a server too."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from tinsmith.commands.model_card import model_card
from tinsmith.config import Config
from tinsmith.config_values import WRITTEN_BESIDE, base_model_source, require_empty
from tinsmith.engine.checkpoints import CheckpointRows
from tinsmith.errors import ConfigError, TinsmithError, UserError, translated
from tinsmith.models.files import holds_all_weights, local_directory, read_object
from tinsmith.models.fingerprint import check_fingerprint, fingerprint_of
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.layout import Layout, read_layout
from tinsmith.protocol.own_directory import OwnDirectory
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import opened
from tinsmith.training.checkpoint import About, SavedState, read_about, stored_weights, write_state
from tinsmith.training.gguf_files import require_gguf, write_adapter_gguf, write_model_gguf, write_modelfile
from tinsmith.training.peft_format import read_peft, write_merged, write_peft
from tinsmith.wire.paths import imported_paths, parse_path
from tinsmith.worker.checkpoint_files import opened_files, write_files

log = logging.getLogger(__name__)


def export_checkpoint(
    data_dir: Path, path: str, directory: Path, merge: bool, gguf: bool = False, moved_base: str | None = None
) -> None:
    """Write a checkpoint as a PEFT adapter, or, with `merge`, as a transformers model; full weights need it.

    With `gguf` a file for llama.cpp and Ollama's Modelfile are written instead, and always a model card.

    `moved_base` is [NAME=]PATH_OR_HUB_ID of the base model, if it is elsewhere now; the export then names it so. Raises
    TinsmithError: no such checkpoint, `directory` in use, another base model or none, full weights without `merge`.
    """
    base_name, base_source = (None, None) if moved_base is None else base_model_source(moved_base)
    require_empty(directory)
    kind = parse_path(path).kind
    if kind == "external":
        raise UserError(
            f"{path} holds files to download: tinker checkpoint download; export a path of weights or sampler_weights"
        )
    with opened(data_dir) as store:
        checkpoints = CheckpointRows(store, CheckpointFiles(data_dir))
        found = store.require_checkpoint(path, kind)
        with opened_files(checkpoints.files, found.directory, optimizer=False) as files:
            about = read_about(files)
            weights = stored_weights(files, about)
    source = base_source or about.base_source
    base = read_layout(source)
    if base.family.model_type != about.architecture:
        raise UserError(
            f"{source} is of architecture {base.family.model_type}; {path} was saved for {about.architecture}"
        )
    fingerprint = _fingerprint(source, fetch=merge)
    if fingerprint is None:
        log.warning(
            "the weights of %s are not on this machine: whether %s was trained on them is not checked", source, path
        )
    else:
        check_fingerprint(about.base_fingerprint, fingerprint, source, path)
    if not merge and isinstance(weights, FullWeights):
        raise UserError(
            f"{path} is of rank 0: all parameters were trained, and there is no adapter to write; add --merge"
        )
    public_name = base_name or about.public_base
    if Path(public_name).is_absolute():
        log.warning("the export names its base %s, which others do not have: add --base-model NAME=PATH", public_name)
    with _whole(directory) as files:
        if gguf:
            _write_gguf(weights, base, source, found.name, public_name, files, merge)
        else:
            _write(weights, base, source, public_name, files, merge)
        card = model_card(found, about, public_name, local_directory(source), merge, gguf)
        (files / "README.md").write_text(card, encoding="utf-8")


def _write(weights: Weights, base: Layout, source: str, public_name: str, files: Path, merge: bool) -> None:
    if merge:
        write_merged(weights, base, source, files)
    else:
        assert not isinstance(weights, FullWeights)
        write_peft(weights, base, public_name, files)


def _write_gguf(
    weights: Weights, base: Layout, source: str, name: str, public_name: str, files: Path, merge: bool
) -> None:
    """Write GGUF and a Modelfile; what they are made of lies beside them meanwhile."""
    require_gguf(base.family.model_type)
    with tempfile.TemporaryDirectory(dir=files) as scratch:
        _write(weights, base, source, public_name, Path(scratch), merge)
        if merge:
            write_model_gguf(Path(scratch), name, files)
        else:
            directory = local_directory(source)
            assert directory is not None  # its layout was read
            write_adapter_gguf(Path(scratch), read_object(directory / "config.json"), name, files)
    write_modelfile(files, public_name, merge)


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A directory whose files come to `directory` when the body ends, or not at all; killed exports are cleaned up.

    Raises TinsmithError for a full disk, ConfigError if another export fills `directory`.
    """
    # What is there may be a mount or the working directory: keep it
    home = directory if directory.is_dir() else directory.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(OwnDirectory(WRITTEN_BESIDE, home)) as own:
            other = next((path for path in home.iterdir() if path != own.path), None) if home == directory else None
            if other is not None:
                raise ConfigError(
                    f"{directory} holds {other.name}: another export writes there, or was killed; "
                    "wait for it, or delete that"
                )
            files = own.path / "files"  # whose mode, unlike that of its own directory, is the usual one
            files.mkdir()
            yield files
            if home != directory:
                files.rename(directory)
                return
            for file in files.iterdir():
                file.rename(directory / file.name)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # of the Hub
            raise
        raise TinsmithError(
            f"{directory} cannot be written: {error}; make room, or name a directory on another disk"
        ) from error


def import_adapter(data_dir: Path, adapter_dir: Path, name: str, base_model: str) -> list[str]:
    """Make a checkpoint to train and one to sample of a PEFT adapter; returns their paths.

    `base_model` is as the server is given it. Raises TinsmithError: no LoRA adapter of that base, or name taken.
    """
    paths = imported_paths(name)
    base_name, source = base_model_source(base_model)
    base = read_layout(source)
    adapter = read_peft(adapter_dir, base, source)
    usual = Config().models.max_lora_rank
    if adapter.shape.rank > usual:
        rank = adapter.shape.rank
        log.warning(
            "the adapter is of rank %d: only a server with --max-lora-rank %d or more trains it further (usual is %d)",
            *(rank, rank, usual),
        )
    fingerprint = _fingerprint(source, fetch=False)
    if fingerprint is None:
        log.warning(
            "the weights of %s are not on this machine: no server can check that it serves the same as %s",
            source,
            base_name,
        )
    about = About(base_name, source, base.family.model_type, adapter.shape, fingerprint)
    write = partial(write_state, SavedState(about, adapter.named_tensors()))
    with opened(data_dir) as store:
        checkpoints = CheckpointRows(store, CheckpointFiles(data_dir))
        store.require_unused(map(str, paths))
        for path in paths:
            row = checkpoints.announce(path, base_name, about.architecture, asdict(adapter.shape))
            found = write_files(checkpoints.files, row, write)
            store.put_checkpoint(Checkpoint(**row, **found, public=True))
    return [str(path) for path in paths]


def _fingerprint(source: str, fetch: bool) -> str | None:
    """The fingerprint of a base model, if its weights are here; `fetch` downloads those of a Hub id."""
    if fetch and not Path(source).is_dir():
        remedy = "give --base-model a directory that has them"
        with translated(
            OSError,
            ConfigError,
            lambda error: f"{source}: cannot download the weights: {str(error).splitlines()[0]}; {remedy}",
        ):
            snapshot_download(source, allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json"])
    directory = local_directory(source)
    return fingerprint_of(directory) if directory is not None and holds_all_weights(directory) else None
