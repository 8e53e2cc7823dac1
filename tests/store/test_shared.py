"""A server that only samples finds what another one saves, and changes nothing of it."""

import json
import time
import uuid
from pathlib import Path

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


def saved(files: CheckpointFiles, path: str = PATH, created_at: float = 1.0, expires_at: float | None = None) -> Checkpoint:
    """A checkpoint that the other server has saved."""
    place = files.new_place()
    row = Checkpoint(**vars(checkpoint(path, expires_at, place)) | {"created_at": created_at})
    with files.written(place) as directory:
        (directory / "weights").write_bytes(b"0123456789")
        write_manifest(directory, row)
    return row


@pytest.fixture(params=["directory", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where both servers look."""
    if request.param == "object store":
        return f"memory://{uuid.uuid4().hex}"
    (tmp_path / "root").mkdir()
    return str(tmp_path / "root")


def test_what_the_other_server_saves_is_found_as_soon_as_it_is_there(root: str, tmp_path: Path) -> None:
    writer = CheckpointFiles(tmp_path / "other", root)
    store, shared = Store.open(tmp_path), SharedCheckpoints(CheckpointFiles(tmp_path / "own", root, only_read=True))
    with pytest.raises(NotFoundError, match=f"{PATH} does not exist"):
        require_sampled(store, shared, PATH)
    row = saved(writer)
    saved(writer, "tinker://m/weights/a")
    assert require_sampled(store, shared, PATH) == row
    with pytest.raises(UserError, match="these weights were saved"):
        require_sampled(store, shared, "tinker://m/weights/a")
    with pytest.raises(NotFoundError):
        require_sampled(store, None, PATH)
    newer = saved(writer, created_at=2.0)
    assert require_sampled(store, shared, PATH) == newer
    writer.remove(newer.directory)
    writer.remove(row.directory)
    with pytest.raises(NotFoundError):
        require_sampled(store, shared, PATH)
    assert store.known_directories() == set()


def test_its_own_checkpoints_come_first_and_expired_ones_are_gone(tmp_path: Path) -> None:
    writer = CheckpointFiles(tmp_path / "other", str(tmp_path / "root"))
    store = Store.open(tmp_path)
    shared = SharedCheckpoints(CheckpointFiles(tmp_path / "own", str(tmp_path / "root"), only_read=True))
    saved(writer, created_at=5.0, expires_at=time.time() - 1)
    with pytest.raises(NotFoundError):
        require_sampled(store, shared, PATH)
    saved(writer, created_at=3.0)
    own = checkpoint(PATH, None, uuid.uuid4().hex)
    store.put_checkpoint(own)
    assert require_sampled(store, shared, PATH) == own


def test_a_checkpoint_that_is_damaged_or_cannot_be_read_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where one of several servers that save there is another user's, or of another version; nor does one that is being written."""
    writer = CheckpointFiles(tmp_path / "other", str(tmp_path / "root"))
    shared = SharedCheckpoints(CheckpointFiles(tmp_path / "own", str(tmp_path / "root"), only_read=True))
    damaged, foreign, lacking = (saved(writer, created_at=created_at) for created_at in (9.0, 8.0, 7.0))
    whole = saved(writer)
    (Path(damaged.directory) / MANIFEST).write_text("{}")
    manifest = Path(lacking.directory) / MANIFEST
    content = json.loads(manifest.read_text())
    del content["sha256"], content["checkpoint"]["kind"]
    manifest.write_text(json.dumps(content | {"sha256": _own_digest(content)}))
    (Path(foreign.directory) / MANIFEST).unlink()
    (Path(foreign.directory) / MANIFEST).mkdir()  # a mode keeps root from nothing
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
    with pytest.raises(ConfigError, match="there is no such directory; start the server that writes to it first, or mount it here"):
        CheckpointFiles(tmp_path / "own", str(root), only_read=True)
    assert not root.exists()
    saved(CheckpointFiles(tmp_path / "other", str(root)))
    before = {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}
    assert SharedCheckpoints(CheckpointFiles(tmp_path / "own", str(root), only_read=True)).find(PATH) is not None
    assert {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))} == before


def test_the_manifest_comes_last_into_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds it finds all files."""
    files = CheckpointFiles(tmp_path, f"memory://{uuid.uuid4().hex}")
    system, _ = files._resolve(files.new_place())
    put, names = type(system).put_file, []

    def note(self: object, local: str, remote: str) -> None:
        names.append(remote.rpartition("/")[2])
        put(self, local, remote)

    monkeypatch.setattr(type(system), "put_file", note)
    saved(files)
    assert names == ["weights", MANIFEST]
