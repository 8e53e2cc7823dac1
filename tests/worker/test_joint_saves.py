"""Checkpoints that several workers write together: what one alone would write, on a disk and on the way to an object
store; or nothing."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.bases import datum, load, random_tokens, renderer
from tests.worker.test_background import delivered
from tinsmith.config import TrainingConfig
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place, writer_of
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.work import CallFailed, ExportModel, FinishSave, PartWritten, SaveModel
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.pieces import FilePiece, write_pieces
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import SavedState, write_state
from tinsmith.training.parallel.checkpoint_shard import CheckpointShard
from tinsmith.training.parallel.flat_row import FlatRow
from tinsmith.training.update_check import ENTRIES
from tinsmith.worker import checkpoint_files
from tinsmith.worker.background import Background
from tinsmith.worker.checkpoint_files import JointSaves, Save, _require_whole
from tinsmith.worker.exports import write_external

COUNT = 2
MODEL = "s:train:0"
WRITER = writer_of(MODEL, COUNT)


@pytest.fixture(scope="module")
def backend(family_dir: Callable[[str], Path]) -> LocalBackend:
    """One worker with a model of all weights after a step."""
    made = LocalBackend(load(family_dir("llama"), device="cpu"), TrainingConfig())
    made.create_model(MODEL, LoraShape(0, seed=1))
    made.run_pass([datum(MODEL, renderer(made.base).render([random_tokens(0, 9)]))], backward=True)
    made.optim_step(MODEL, AdamSettings(0.01, (0.9, 0.95), 1e-8, 0.1, 0.5))
    return made


def part_of(state: SavedState, rank: int) -> CheckpointShard:
    """What one of COUNT workers would have of it: two tensors in each row."""
    names = list(state.tensors)
    groups = [names[first : first + 2] for first in range(0, len(names), 2)]
    rows = {group[0]: FlatRow({name: state.tensors[name].shape for name in group}, COUNT) for group in groups}

    def cut(entry: str) -> dict[str, torch.Tensor]:
        found = {}
        for name, row in rows.items():
            tensors = (
                state.tensors if not entry else {each: (state.moments or {})[f"{each}.{entry}"] for each in row.shapes}
            )
            found[name] = torch.empty(row.part)
            row.fill(found[name], rank * row.part, [tensors[each] for each in row.shapes])
        return found

    moments = None if state.moments is None else {entry: cut(entry) for entry in ENTRIES}
    step = None if state.moments is None else state.moments[f"{names[0]}.step"]
    return CheckpointShard(state.about if rank == WRITER else None, rows, rank, cut(""), moments, step)


class Workers:
    """COUNT of them in this process, and what they say."""

    def __init__(self, data_dir: Path, root: str) -> None:
        self.data_dir = data_dir
        self.said: list[Message] = []
        self.answers: list[dict[str, Any] | BaseException] = []
        self.files = CheckpointFiles(data_dir, root)
        self.place = self.files.new_place()
        self.disk = Background("disk", 4, lambda: None)
        self.saves = [
            JointSaves(self.files, self.disk, self.said.append, Place(rank, COUNT), self.answer)
            for rank in range(COUNT)
        ]

    def answer(self, save: Save, work: Callable[[], dict[str, Any]]) -> None:
        self.disk.run(work, lambda ended: self.answers.append(ended.exception() or ended.result()))

    def written(
        self, save: Save, state: SavedState, ranks: Sequence[int] = range(COUNT)
    ) -> list[tuple[str, int, int, int]]:
        """What some of them tell of their parts."""
        for rank in ranks:
            self.saves[rank].write(save, part_of(state, rank))
        delivered(self.disk)
        return [piece for message in self.said if isinstance(message, PartWritten) for piece in message.pieces]

    def finish(self, told: list[tuple[str, int, int, int]], *error: str) -> None:
        """Let one make a checkpoint of the parts, or delete them because of an error."""
        self.saves[WRITER].finish(FinishSave(1, self.place, told, *error))
        delivered(self.disk)

    @property
    def left(self) -> tuple[int, list[Path]]:
        """Bytes of the checkpoint, and files that are not finished."""
        return self.files.remaining_bytes(self.place), list(self.data_dir.rglob(".writing-*"))


@pytest.fixture(params=["directory", "object store"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Workers:
    """With each kind of root."""
    return Workers(tmp_path / "data", "" if request.param == "directory" else f"memory://{uuid4().hex}/x")


def saved_to(place: str) -> SaveModel:
    """A save to a place, and what is known of the checkpoint before it is written."""
    row: dict[str, Any] = {
        "tinker_path": "tinker://s:train:0/weights/c",
        "model_id": MODEL,
        "kind": "training",
        "name": "c",
        "directory": place,
    }
    row |= {"base_model": "tiny", "architecture": "llama", "lora_config": {"rank": 0}, "user_metadata": None}
    return SaveModel(1, "tiny", MODEL, True, row | {"created_at": 1.0, "expires_at": None})


def exported_to(place: str) -> ExportModel:
    return ExportModel(1, "tiny", MODEL, [], saved_to(place).checkpoint | {"kind": "external"})


def contents(directory: Path) -> dict[str, Any]:
    """The files below a directory but for the manifest: bytes, or all tensors with their bytes."""
    files = [file for file in directory.rglob("*") if file.is_file() and file.name != "manifest.json"]
    return {
        file.name: {name: (each.shape, each.numpy().tobytes()) for name, each in sorted(load_file(file).items())}
        if file.suffix == ".safetensors"
        else file.read_bytes()
        for file in files
    }


@pytest.mark.parametrize("is_export", [False, True])
def test_the_files_are_those_of_one_worker(
    workers: Workers, backend: LocalBackend, tmp_path: Path, is_export: bool
) -> None:
    state = backend.copy_state(MODEL, optimizer=not is_export)
    if is_export:
        write_external(state, backend.base.layout, tmp_path / "alone", [])
    else:
        write_state(state, tmp_path / "alone")
    expected = contents(tmp_path / "alone")
    size = sum(file.stat().st_size for file in (tmp_path / "alone").rglob("*") if file.is_file())
    told = workers.written((exported_to if is_export else saved_to)(workers.place), state)
    assert (workers.files.at(workers.place).sizes(), workers.files.finished_places()) == ({}, [])
    workers.finish(told)
    with workers.files.fetched(workers.place) as directory:
        assert contents(directory) == expected
        manifest = read_manifest(directory, "")
        assert manifest is not None
        verify_files(manifest, directory, "")
    assert is_export or workers.answers == [{"has_optimizer": True, "size_bytes": size}]
    assert workers.left[1] == []


@pytest.mark.parametrize("ranks", [[0], [1], []])
def test_nothing_is_left_of_a_save_that_one_failed_at_or_of_which_a_part_is_missing(
    workers: Workers, backend: LocalBackend, ranks: list[int]
) -> None:
    """Whatever the engine says."""
    state = backend.copy_state(MODEL, optimizer=True)
    workers.written(saved_to(workers.place), state, ranks)
    workers.finish([], "TinsmithError", "no")
    assert workers.said[-1] == CallFailed(1, "TinsmithError", "no")
    assert (workers.left, workers.saves[WRITER].begun) == ((0, []), {})
    workers.said.clear()
    told = workers.written(saved_to(workers.place), state, [WRITER])
    workers.finish(told)
    assert "adapter.safetensors does not hold what the workers wrote to its bytes" in str(workers.answers)
    assert workers.left == (0, [])


def test_a_file_whose_end_nobody_wrote_makes_no_checkpoint(tmp_path: Path) -> None:
    """All pieces are there, and follow each other: its header alone says what is missing."""
    save_file({"a": torch.zeros(4, 8)}, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    for end in (len(data), len(data) - 4):
        directory = tmp_path / str(end)
        told = write_pieces(directory, [FilePiece("adapter.safetensors", 0, memoryview(data[:end]))])
        with nullcontext() if end == len(data) else pytest.raises(SafetensorError):
            _require_whole(directory, told)


def test_an_export_leaves_nothing_unencrypted_or_fails(
    workers: Workers, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there before what it was made of is gone."""
    told = workers.written(exported_to(workers.place), backend.copy_state(MODEL, optimizer=False))

    def kept(directory: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("the disk keeps it")

    monkeypatch.setattr(checkpoint_files, "shutil", SimpleNamespace(rmtree=kept))
    workers.finish(told)
    assert "the disk keeps it" in str(workers.answers)
    assert workers.files.finished_places() == []
