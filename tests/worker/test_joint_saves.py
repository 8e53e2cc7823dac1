"""Checkpoints that several workers write together: what one alone would write, on a disk and on the way to an object store; or nothing."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.bases import datum, load, random_tokens, renderer
from tests.engine.here import LONG_S
from tinsmith.config import TrainingConfig
from tinsmith.models.flat_row import FlatRow
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place, writer_of
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.work import CallFailed, ExportModel, FinishSave, PartWritten, SaveModel
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.pieces import FilePiece, write_pieces
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import SavedState, write_state
from tinsmith.training.state_part import ENTRIES, StatePart
from tinsmith.worker import joint_saves
from tinsmith.worker.background import Background
from tinsmith.worker.exports import write_external
from tinsmith.worker.joint_saves import JointSaves, Save, _require_whole

COUNT = 3
MODEL = "s:train:0"


@pytest.fixture(scope="module")
def backend(family_dir: Callable[[str], Path]) -> LocalBackend:
    """One worker with a model of all weights after a step."""
    made = LocalBackend(load(family_dir("llama"), device="cpu"), TrainingConfig())
    made.create_model(MODEL, LoraShape(0, seed=1))
    made.run_pass([datum(MODEL, renderer(made.base).render([random_tokens(0, 9)]))], backward=True)
    made.optim_step(MODEL, AdamSettings(0.01, (0.9, 0.95), 1e-8, 0.1, 0.5))
    return made


def part_of(state: SavedState, rank: int) -> StatePart:
    """What one of COUNT workers would have of it: two tensors in each row."""
    names = list(state.tensors)
    groups = [names[first : first + 2] for first in range(0, len(names), 2)]
    rows = {group[0]: FlatRow({name: state.tensors[name].shape for name in group}, COUNT) for group in groups}

    def cut(entry: str) -> dict[str, torch.Tensor]:
        found = {}
        for name, row in rows.items():
            tensors = state.tensors if not entry else {each: (state.moments or {})[f"{each}.{entry}"] for each in row.shapes}
            found[name] = torch.empty(row.part)
            row.fill(found[name], rank * row.part, [tensors[each] for each in row.shapes])
        return found

    moments = None if state.moments is None else {entry: cut(entry) for entry in ENTRIES}
    step = None if state.moments is None else state.moments[f"{names[0]}.step"]
    return StatePart(state.about if rank == writer_of(MODEL, COUNT) else None, rows, rank, cut(""), moments, step)


class Workers:
    """COUNT of them in this process, and what they say."""

    def __init__(self, data_dir: Path, root: str) -> None:
        self.data_dir = data_dir
        self.said: list[list[Message]] = [[] for _ in range(COUNT)]
        self.answers: list[dict[str, Any] | BaseException] = []
        self.files = CheckpointFiles(data_dir, root)
        self.ended = threading.Event()
        self.disk = Background("disk", 4, self.ended.set)
        self.saves = [
            JointSaves(self.files, self.disk, said.append, Place(rank, COUNT), self.answer) for rank, said in enumerate(self.said)
        ]

    def answer(self, save: Save, work: Callable[[], dict[str, Any]]) -> None:
        self.disk.run(work, lambda ended: self.answers.append(ended.exception() or ended.result()))

    def settle(self) -> None:
        while self.disk.running:
            assert self.ended.wait(LONG_S)
            self.ended.clear()
            self.disk.deliver()

    def written(self, save: Save, state: SavedState, ranks: Sequence[int] = range(COUNT)) -> list[tuple[str, int, int, int]]:
        """What some of them tell of their parts."""
        for rank in ranks:
            self.saves[rank].write(save, part_of(state, rank))
        self.settle()
        told = [message for said in self.said for message in said if isinstance(message, PartWritten)]
        assert {message.number for message in told} == {save.number}
        return [piece for message in told for piece in message.pieces]

    def finish(self, message: FinishSave) -> None:
        self.saves[writer_of(MODEL, COUNT)].finish(message)
        self.settle()

    @property
    def unfinished(self) -> list[Path]:
        return list(self.data_dir.parent.rglob(".writing-*"))


@pytest.fixture(params=["directory", "object store"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Workers:
    """With each kind of root."""
    return Workers(tmp_path / "data", "" if request.param == "directory" else f"memory://{uuid4().hex}/x")


def saved_to(place: str, optimizer: bool = True, number: int = 1) -> SaveModel:
    """A save to a place, and what is known of the checkpoint before it is written."""
    row = {"tinker_path": "tinker://s:train:0/weights/c", "model_id": MODEL, "kind": "training", "name": "c", "directory": place}
    row |= {"base_model": "tiny", "architecture": "llama", "lora_config": {"rank": 0}, "user_metadata": None}
    return SaveModel(number, "tiny", MODEL, optimizer, row | {"created_at": 1.0, "expires_at": None})


def exported_to(place: str) -> ExportModel:
    return ExportModel(1, "tiny", MODEL, [], saved_to(place).checkpoint | {"kind": "external"})


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory but for the manifest."""
    return {file.name: file.read_bytes() for file in directory.rglob("*") if file.is_file() and file.name != "manifest.json"}


@pytest.mark.parametrize("kind", ["training", "external"])  # weights alone: tests/distributed/test_divided.py
def test_the_files_are_those_of_one_worker(workers: Workers, backend: LocalBackend, tmp_path: Path, kind: str) -> None:
    optimizer = kind == "training"
    place, state = workers.files.new_place(), backend.copy_state(MODEL, optimizer)
    save: Save = exported_to(place) if kind == "external" else saved_to(place, optimizer)
    if kind == "external":
        write_external(state, backend.base.layout, tmp_path / "alone", [])
    else:
        write_state(state, tmp_path / "alone")
    told = workers.written(save, state)
    assert workers.files.sizes(place) == {}
    assert workers.files.finished_places() == []
    workers.finish(FinishSave(1, place, told))
    expected = contents(tmp_path / "alone")
    with workers.files.fetched(place) as directory:
        assert contents(directory) == expected
        manifest = read_manifest(directory, "")
        assert manifest is not None
        verify_files(manifest, directory, "")
    if kind != "external":
        assert workers.answers == [{"has_optimizer": optimizer, "size_bytes": sum(map(len, expected.values()))}]
    assert workers.unfinished == []


def test_nothing_is_left_of_a_save_that_one_failed_at(workers: Workers, backend: LocalBackend) -> None:
    place, state = workers.files.new_place(), backend.copy_state(MODEL, optimizer=True)
    writer = writer_of(MODEL, COUNT)
    for number, ranks in enumerate(([(writer + 1) % COUNT], [writer], [])):
        if ranks:
            workers.written(saved_to(place, number=number), state, ranks)
            assert workers.files.remaining_bytes(place) > 0
        workers.finish(FinishSave(number, place, [], "TinsmithError", "no"))
        assert workers.said[writer][-1] == CallFailed(number, "TinsmithError", "no")
        assert (workers.files.remaining_bytes(place), workers.unfinished, workers.saves[writer].begun) == (0, [], {})
        for said in workers.said:
            said.clear()


def test_a_part_that_is_missing_makes_no_checkpoint(workers: Workers, backend: LocalBackend) -> None:
    """Whatever the engine says."""
    place, state = workers.files.new_place(), backend.copy_state(MODEL, optimizer=True)
    told = workers.written(saved_to(place), state, [writer_of(MODEL, COUNT)])
    workers.finish(FinishSave(1, place, told))
    assert "adapter.safetensors does not hold what the workers wrote to its bytes" in str(workers.answers)
    assert (workers.files.remaining_bytes(place), workers.unfinished) == (0, [])


def test_a_file_whose_end_nobody_wrote_makes_no_checkpoint(tmp_path: Path) -> None:
    """All pieces are there, and follow each other: its header alone says what is missing."""
    save_file({"a": torch.zeros(4, 8)}, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    for end in (len(data), len(data) - 4):
        directory = tmp_path / str(end)
        told = write_pieces(directory, [FilePiece("adapter.safetensors", 0, memoryview(data[:end]))])
        with nullcontext() if end == len(data) else pytest.raises(SafetensorError):
            _require_whole(directory, told)


def test_an_export_leaves_nothing_unencrypted_or_fails(workers: Workers, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there before what it was made of is gone."""
    place, state = workers.files.new_place(), backend.copy_state(MODEL, optimizer=False)
    told = workers.written(exported_to(place), state)

    def kept(directory: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("the disk keeps it")

    monkeypatch.setattr(joint_saves, "shutil", SimpleNamespace(rmtree=kept))
    workers.finish(FinishSave(1, place, told))
    assert "the disk keeps it" in str(workers.answers)
    assert workers.files.finished_places() == []
