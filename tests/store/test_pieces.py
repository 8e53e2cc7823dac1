"""Files that several processes write together: whole, or refused."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import REAL_PYTHON
from tinsmith.errors import TinsmithError
from tinsmith.store import pieces
from tinsmith.store.pieces import FilePiece, check_pieces, write_pieces

ONE, OTHER = bytes(range(256)) * 40, b"xyz" * 3000
WHOLE = ONE[:5000] + OTHER + ONE[5000:]

WRITES = """
import sys
from pathlib import Path
from tinsmith.store.pieces import FilePiece, write_pieces
rank, directory, between_hosts = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
starts = enumerate(range(0, 33 * 3000, 33))
pieces = [FilePiece("a", start, memoryview(bytes([number % 256]) * 33)) for number, start in starts]
for told in write_pieces(directory, pieces[rank::3], between_hosts):
    print(*told)
"""


def of_one() -> Iterator[FilePiece]:
    """Both ends of file `a`, and all of file `b`."""
    yield FilePiece("a", 0, memoryview(ONE)[:5000])
    yield FilePiece("b", 0, memoryview(b"whole"))
    yield FilePiece("a", 5000 + len(OTHER), memoryview(ONE)[5000:])


def of_other() -> Iterator[FilePiece]:
    """The middle of file `a`."""
    yield FilePiece("a", 5000, memoryview(OTHER))


@pytest.mark.parametrize("between_hosts", [False, True])
def test_pieces_make_a_file_whoever_comes_first(
    tmp_path: Path, between_hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a piece is cut."""
    monkeypatch.setattr(pieces, "LARGEST", 4000)
    for name, order in (("c", (of_one, of_other)), ("d", (of_other, of_one))):
        told = [each for write in order for each in write_pieces(tmp_path / name, write(), between_hosts)]
        check_pieces(tmp_path / name, told)
        assert (tmp_path / name / "a").read_bytes() == WHOLE
        assert (tmp_path / name / "b").read_bytes() == b"whole"
        assert max(size for _, _, size, _ in told) == 4000


@pytest.mark.parametrize("between_hosts", [False, True])
def test_processes_that_write_into_the_same_pages_lose_nothing(tmp_path: Path, between_hosts: bool) -> None:
    command = [REAL_PYTHON, "-c", WRITES]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "c"), str(between_hosts)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    lines = [line.split() for process in running for line in process.communicate()[0].splitlines()]
    assert len(lines) == 3000
    check_pieces(tmp_path / "c", [(name, int(start), int(size), int(crc)) for name, start, size, crc in lines])
    assert (tmp_path / "c" / "a").read_bytes() == b"".join(bytes([number % 256]) * 33 for number in range(3000))


def test_what_is_missing_or_changed_is_refused(tmp_path: Path) -> None:
    told = write_pieces(tmp_path, [*of_one(), *of_other()])
    check_pieces(tmp_path, told)
    (tmp_path / "empty").mkdir()

    def refused(says: str, told: list[Any] = told, directory: Path = tmp_path) -> None:
        with pytest.raises(TinsmithError, match=says):
            check_pieces(directory, told)

    refused("no worker has told", [], tmp_path / "empty")
    (tmp_path / "empty").rmdir()
    refused("holds a.*, of which no worker has told", [])
    for lacking, where in ((told[:-1], "5,000 to 14,000"), (told[1:], "0 to 5,000"), ([*told, told[0]], "0 to 5,000")):
        refused(f"a does not hold what the workers wrote to its bytes {where}", lacking)
    (tmp_path / "other").touch()
    refused("holds other, of which no worker has told")
    (tmp_path / "other").unlink()
    says = (
        "19,240 to 19,244",
        "19,239 to 19,240",
        "5,000 to 14,000: the file system of .* does not keep what several processes write",
    )
    for content, where in zip((WHOLE + b"more", WHOLE[:-1], WHOLE[:6000] + b"\0" + WHOLE[6001:]), says, strict=True):
        (tmp_path / "a").write_bytes(content)
        refused(f"bytes {where}")
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        check_pieces(tmp_path, told)
