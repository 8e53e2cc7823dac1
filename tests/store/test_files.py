"""Directories of checkpoint files, on the disk and in an object store."""

from pathlib import Path
from uuid import uuid4

import pytest

from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.store.files import CheckpointFiles

FILES = {"a": b"0123456789", "b": b""}


@pytest.fixture(params=["data directory", "directory", "object store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFiles:
    """The files of a data directory, by each kind of root."""
    roots = {
        "data directory": "",
        "directory": str(tmp_path / "elsewhere"),
        "object store": f"memory://{uuid4().hex}/x/",
    }
    return CheckpointFiles(tmp_path / "data", roots[request.param])


def write(files: CheckpointFiles) -> str:
    """A directory of FILES; returns its place."""
    place = files.new_place()
    with files.written(place) as directory:
        for name, content in FILES.items():
            (directory / name).write_bytes(content)
    return place


def test_what_is_written_is_read_until_it_is_removed(files: CheckpointFiles, tmp_path: Path) -> None:
    place, other = write(files), write(files)
    assert files.at(place).sizes() == {"a": 10, "b": 0}
    assert files.remaining_bytes(place) == 10
    assert b"".join(files.at(place).read("a", range(2, 7))) == b"23456"
    assert b"".join(files.at(place).read("b", range(0))) == b""
    with files.fetched(place) as directory:
        assert {file.name: file.read_bytes() for file in directory.iterdir()} == FILES
    assert list((tmp_path / "data" / "checkpoints").glob(".writing-*")) == []
    for _ in range(2):
        files.remove(place)
        assert (files.at(place).sizes(), files.remaining_bytes(place)) == ({}, 0)
    with pytest.raises(NotFoundError, match="deleted while it was read"), files.fetched(place) as directory:
        (directory / "a").read_bytes()
    assert files.at(other).sizes() == {"a": 10, "b": 0}


def test_what_several_processes_have_filled_is_written_when_it_is_joined(
    files: CheckpointFiles, tmp_path: Path
) -> None:
    """And is nowhere if that fails, or if it is removed instead."""
    place, failed, abandoned = (files.new_place() for _ in range(3))
    for each in (place, failed, abandoned):
        joint = files.joint(each)
        assert files.joint(each) == joint
        joint.mkdir()
        for name, content in FILES.items():
            (joint / name).write_bytes(content)
    assert [files.at(each).sizes() for each in (place, failed, abandoned)] == [{}] * 3
    assert files.finished_places() == []
    assert files.remaining_bytes(abandoned) == 10
    with files.joined(place) as directory:
        assert directory == files.joint(place)
    assert files.at(place).sizes() == {"a": 10, "b": 0}
    with pytest.raises(ValueError, match="no"), files.joined(failed):
        raise ValueError("no")
    files.remove(abandoned)
    assert [files.at(each).sizes() for each in (failed, abandoned)] == [{}] * 2
    assert [path for path in tmp_path.rglob(".writing-*") if path.is_dir()] == []


def test_places_are_found_under_another_root_and_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = [write(CheckpointFiles(Path("data"), root)) for root in ("", "here", f"file://{tmp_path}/there")]
    (tmp_path / "data").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    moved = CheckpointFiles(tmp_path / "moved")
    assert [moved.at(place).sizes() for place in places] == [{"a": 10, "b": 0}] * 3


@pytest.mark.parametrize("name", ["a::b", "a?b", "a#b", "a%20b", "a=b c", "ü&~", "a[b]*"])
@pytest.mark.parametrize("as_root", [False, True])
def test_a_directory_of_any_name_has_its_files(name: str, as_root: bool, tmp_path: Path) -> None:
    """To fsspec `a::b` is a chain of file systems, of which it took the first: every checkpoint was `a`, and to remove
    one deleted that."""
    neighbor = tmp_path / "a" / "of others"
    neighbor.parent.mkdir()
    neighbor.write_text("theirs")
    files = CheckpointFiles(tmp_path / "data", str(tmp_path / name)) if as_root else CheckpointFiles(tmp_path / name)
    place, other = write(files), write(files)
    assert (
        tmp_path / name / ("" if as_root else "checkpoints") / place.rpartition("/")[2] / "a"
    ).read_bytes() == FILES["a"]
    assert files.at(place).sizes() == {"a": 10, "b": 0}
    assert b"".join(files.at(place).read("a", range(10))) == FILES["a"]
    assert sorted(files.finished_places()) == sorted([place, other])
    files.remove(place)
    assert (files.at(place).sizes(), files.at(other).sizes()) == ({}, {"a": 10, "b": 0})
    assert neighbor.read_text() == "theirs"


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("nothing://x", "cannot be used: "),
        ("/dev/null/x", "cannot be used: "),
        # Not taken for a directory of that name in the working directory.
        ("s3://", "names no bucket; give it as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX$"),
        (
            "memory://a::b",
            "cannot be used: .*: fsspec takes '::' in a URL for a chain of stores; choose a URL without it$",
        ),
        ("gs:///", "names no bucket; give it as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX$"),
    ],
)
def test_a_root_that_cannot_be_used_is_refused(root: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoint_root='{root}' {why}"):
        CheckpointFiles(tmp_path / "data", root)
