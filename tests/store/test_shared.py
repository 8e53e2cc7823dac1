"""A server that only samples finds what another one saves, and changes nothing of it."""

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_store import checkpoint
from tinsmith.errors import ConfigError, NotFoundError, TinsmithError, UserError
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import NAME as MANIFEST
from tinsmith.store.manifest import _own_digest, write_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.store.shared import SharedCheckpoints, require_sampled
from tinsmith.store.store import Store

PATH = "tinker://m/sampler_weights/a"


def saved(
    files: CheckpointFiles, path: str = PATH, created_at: float = 1.0, expires_at: float | None = None
) -> Checkpoint:
    """A checkpoint that the other server has saved."""
    place = files.new_place()
    row = Checkpoint(**vars(checkpoint(path, expires_at, place)) | {"created_at": created_at})
    with files.written(place) as directory:
        (directory / "weights").write_bytes(b"0123456789")
        write_manifest(directory, row)
    return row


def servers(root: str, tmp_path: Path) -> tuple[CheckpointFiles, Store, SharedCheckpoints]:
    """The files of the other server, and what this one has and sees of them."""
    writer = CheckpointFiles(tmp_path / "other", root)
    return writer, Store.open(tmp_path), SharedCheckpoints(CheckpointFiles(tmp_path / "own", root, only_read=True))


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_what_the_other_server_saves_is_found_as_soon_as_it_is_there(kind: str, tmp_path: Path) -> None:
    """Its own checkpoints come first, and expired ones are gone."""
    root = str(tmp_path / "root") if kind == "directory" else f"memory://{uuid.uuid4().hex}"
    writer, store, shared = servers(root, tmp_path)

    def refused(
        error: type[TinsmithError], path: str = PATH, says: str = f"{PATH} does not exist", seen: Any = shared
    ) -> None:
        with pytest.raises(error, match=says):
            require_sampled(store, seen, path)

    saved(writer, created_at=5.0, expires_at=time.time() - 1)
    refused(NotFoundError)
    row = saved(writer)
    saved(writer, "tinker://m/weights/a")
    assert require_sampled(store, shared, PATH) == row
    refused(UserError, "tinker://m/weights/a", "these weights were saved")
    refused(NotFoundError, seen=None)
    newer = saved(writer, created_at=2.0)
    assert require_sampled(store, shared, PATH) == newer
    for each in (newer, row):
        writer.remove(each.directory)
    refused(NotFoundError)
    assert store.known_directories() == set()
    saved(writer, created_at=3.0)
    own = checkpoint(PATH, None, uuid.uuid4().hex)
    store.put_checkpoint(own)
    assert require_sampled(store, shared, PATH) == own


def test_a_checkpoint_that_is_damaged_or_cannot_be_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one of several servers that save there is another user's, or of another version; nor does one that is
    being written."""
    writer, _, shared = servers(str(tmp_path / "root"), tmp_path)
    damaged, foreign, lacking = (
        Path(saved(writer, created_at=created_at).directory) / MANIFEST for created_at in (9.0, 8.0, 7.0)
    )
    whole = saved(writer)
    damaged.write_text("{}")
    content = json.loads(lacking.read_text())
    del content["sha256"], content["checkpoint"]["kind"]
    lacking.write_text(json.dumps(content | {"sha256": _own_digest(content)}))
    foreign.unlink()
    foreign.mkdir()  # a mode keeps root from nothing
    (tmp_path / "root" / uuid.uuid4().hex).mkdir()
    assert shared.find(PATH) == shared.find(PATH) == whole
    left_out = [line for line in caplog.messages if "is left out" in line]
    assert len(left_out) == 2
    assert any("manifest.json does not say the checkpoint's kind" in line for line in left_out)
    with pytest.raises(TinsmithError, match="cannot be used"):  # it may be the one that is asked for
        shared.find("tinker://m/sampler_weights/b")


def test_a_root_is_only_read(tmp_path: Path) -> None:
    """Not even the file with which a server tries out whether it can write."""
    root = tmp_path / "root"
    with pytest.raises(
        ConfigError, match="there is no such directory; start the server that writes to it first, or mount it here"
    ):
        CheckpointFiles(tmp_path / "own", str(root), only_read=True)
    assert not root.exists()
    saved(CheckpointFiles(tmp_path / "other", str(root)))
    before = {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}
    assert SharedCheckpoints(CheckpointFiles(tmp_path / "own", str(root), only_read=True)).find(PATH) is not None
    assert {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))} == before


def test_the_manifest_comes_last_into_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds it finds all files."""
    files = CheckpointFiles(tmp_path, f"memory://{uuid.uuid4().hex}")
    system = files.at(files.new_place()).system
    put, names = type(system).put_file, []

    def note(self: object, local: str, remote: str) -> None:
        names.append(remote.rpartition("/")[2])
        put(self, local, remote)

    monkeypatch.setattr(type(system), "put_file", note)
    saved(files)
    assert names == ["weights", MANIFEST]
