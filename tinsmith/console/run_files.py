"""Reads the directories that runs of reinforcement learning write; docs/rl.md lists their files.

What is read stays in memory while its file does not change. The files may be those of a run that goes on.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson
import zstandard
from cachetools import LRUCache

from tinsmith.errors import NotFoundError, UserError, quoted, translated

_FORMAT = 1
_SUFFIX = ".jsonl.zst"
MOST_BYTES = 2**28
"""Most bytes of a file that a page reads, once it is decompressed; and of all files that stay in memory.

There, a text takes up to ten times its size.
"""
_TOO_LARGE = f"it holds more than {MOST_BYTES // 2**20} MiB, and pages show no larger files"
_PIECE = 2**10
"""Bytes that are decompressed at once, to 32 MiB at most: Zstandard packs 128 KiB into 4 bytes."""
_HEADING_BYTES = 2**10
_IMAGE = re.compile(r"[0-9a-f]{64}\.(png|jpeg)")
_STEP = re.compile(r"step-(\d+)")

Value = TypeVar("Value")
Json = dict[str, Any]


class KeptContents:
    """Contents of files, each as it was read last. For any thread; one of them reads at a time."""

    def __init__(self, most: int, size_of: Callable[[Any], int] = lambda _: 1) -> None:
        """Their sizes add up to `most`; by default, each is 1."""
        self._values: LRUCache[str, tuple[tuple[int, int, int], Any]] = LRUCache(most, lambda kept: size_of(kept[1]))
        self._lock = threading.Lock()

    def read(self, file: Path, parse: Callable[[Path], Value]) -> Value:
        """The result of `parse` for a file. Raises OSError if it cannot be read."""
        found = file.stat()
        name, state = str(file), (found.st_ino, found.st_mtime_ns, found.st_size)
        with self._lock:
            kept = self._values.get(name)
            if kept is not None and kept[0] == state:
                same: Value = kept[1]
                return same
            self._values.pop(name, None)  # a file that grows would stay in memory once for each of its lengths
            value = parse(file)
            self._values[name] = state, value
            return value


@dataclass(frozen=True)
class Heading:
    """The first line of a file of trajectories."""

    name: str
    """Name of the file, without its suffix."""
    kind: str
    """`step` or `evaluation`."""
    step: int | None
    """Number of steps behind it; None for an evaluation of its own."""
    env: str
    groups: int
    trajectories: int
    reward: float | None
    """The mean."""
    model: str
    """Weights that were evaluated on their own, else empty."""
    size: ClassVar[int] = _HEADING_BYTES

    @property
    def order(self) -> tuple[bool, int, bool]:
        """Its place among the others, as a key to sort by."""
        return self.step is None, self.step or 0, self.kind == "step"


@dataclass(frozen=True)
class _Lines:
    """Lines of a file, each an object; a file of one object is one line."""

    lines: list[Json]
    size: int
    """Bytes of its text."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, directory: Path, server: str, kept: KeptContents, episodes: KeptContents) -> None:
        self.directory, self._server, self._kept, self._episodes = directory, server, kept, episodes

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.directory.name

    @property
    def changed_at(self) -> float:
        """Unix time of the newest metrics, or of the directory."""
        metrics = self.directory / "metrics.jsonl"
        return (metrics if metrics.exists() else self.directory).stat().st_mtime

    def metrics(self) -> list[Json]:
        """The metrics of each step, in order."""
        return self._optional("metrics.jsonl", _read_metrics)

    def config(self) -> Json:
        """The settings of the run, by section."""
        return next(iter(self._optional("config.json", _read_object)), {})

    def state(self) -> Json:
        """The content of state.json: the step at which the run would go on, and its checkpoints."""
        return next(iter(self._optional("state.json", _read_object)), {})

    @property
    def server(self) -> str:
        """URL of the server at which its checkpoints are; empty if that is not known."""
        section = self.config().get("server")
        url = self._server or str(section.get("url") if isinstance(section, dict) else "").rstrip("/")
        return url if url.startswith(("http://", "https://")) else ""

    def headings(self) -> list[Heading]:
        """The headings of all files of trajectories, by step; evaluations come before the step that follows them."""
        directory = self.directory / "trajectories"
        files = sorted(directory.glob(f"*{_SUFFIX}")) if directory.is_dir() else []
        return sorted((self._kept.read(file, _read_heading) for file in files), key=lambda each: each.order)

    def heading(self, name: str) -> Heading:
        """One of them. Raises NotFoundError."""
        found = next((each for each in self.headings() if each.name == name), None)
        if found is None:
            raise NotFoundError(f"run {self.name} has no trajectories {quoted(name)}; it may have deleted old ones")
        return found

    def episodes(self, name: str) -> list[Json]:
        """The trajectories of a file. Raises NotFoundError, and UserError if it cannot be read."""
        heading = self.heading(name)
        return self._episodes.read(self.directory / "trajectories" / f"{heading.name}{_SUFFIX}", _read_lines).lines[1:]

    def image(self, name: str) -> Path:
        """The place of an image. Raises NotFoundError."""
        file = self.directory / "trajectories" / "images" / name
        if not _IMAGE.fullmatch(name) or not file.is_file():
            raise NotFoundError(f"run {self.name} has no image {quoted(name)}")
        return file

    def checkpoints(self) -> dict[int, str]:
        """Paths of weights for sampling that are still kept, by the number of steps behind them."""
        state = self.state()
        kept = [path for path in state.get("kept") or () if isinstance(path, str) and "/sampler_weights/" in path]
        found = {int(match[1]): path for path in kept if (match := _STEP.fullmatch(path.rpartition("/")[2]))}
        if state.get("best_weights"):
            found.setdefault(int(state.get("best_step") or 0), str(state["best_weights"]))
        return dict(sorted(found.items()))

    def trains(self, model_id: str) -> bool:
        """Whether it has saved checkpoints of this model."""
        weights, kept = self.state().get("weights"), self.state().get("kept")
        saved = [weights, *(kept if isinstance(kept, list) else ())]
        return any(str(path).startswith(f"tinker://{model_id}/") for path in saved)

    def _optional(self, name: str, parse: Callable[[Path], _Lines]) -> list[Json]:
        file = self.directory / name
        return self._kept.read(file, parse).lines if file.exists() else []


class RunFiles:
    """The runs in a directory: it is one itself, or those directly below it are."""

    def __init__(self, root: Path, server: str = "") -> None:
        """`server` is the URL at which the checkpoints of all are; else each run says it."""
        self.root, self._server = root.resolve(), server.rstrip("/")
        self._kept, self._episodes = (KeptContents(MOST_BYTES, lambda read: read.size) for _ in range(2))

    def runs(self) -> list[RunDirectory]:
        """All of them, the newest first."""
        places = [self.root] if _is_run(self.root) else [place for place in _below(self.root) if _is_run(place)]
        found = [RunDirectory(place, self._server, self._kept, self._episodes) for place in places]
        return sorted(found, key=lambda run: -run.changed_at)

    def run(self, name: str) -> RunDirectory:
        """One of them. Raises NotFoundError."""
        found = next((run for run in self.runs() if run.name == name), None)
        if found is None:
            raise NotFoundError(f"there is no run {quoted(name)} in {self.root}")
        return found

    def of_model(self, model_id: str) -> RunDirectory | None:
        """The newest run that has saved checkpoints of a model; one whose files cannot be read is passed over."""
        for run in self.runs():
            with suppress(UserError, OSError):
                if run.trains(model_id):
                    return run
        return None


def _below(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (Path(entry.path) for entry in os.scandir(root) if entry.is_dir())


def _is_run(place: Path) -> bool:
    return (place / "trajectories").is_dir() or (place / "metrics.jsonl").is_file()


def _read_metrics(file: Path) -> _Lines:
    """The last line is incomplete while it is written."""
    with _readable(file):
        content = _whole(file)
        lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        # Of json, which writes numbers that are none, and reads them
        found = [dict(json.loads(line, parse_constant=lambda _: None)) for line in lines]
        return _Lines([{**line, "step": int(line["step"])} for line in found], len(content))


def _read_object(file: Path) -> _Lines:
    with _readable(file):
        content = _whole(file)
        return _Lines([dict(orjson.loads(content))], len(content))


def _whole(file: Path) -> bytes:
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(_TOO_LARGE)
    return file.read_bytes()


def _read_heading(file: Path) -> Heading:
    with _readable(file):
        line = _lines(file, only_first=True).lines[0]
        if line["format"] != _FORMAT:
            raise UserError(f"{file} has format {quoted(line['format'])}, and this version reads {_FORMAT}; upgrade")
        name, step, reward = file.name.removesuffix(_SUFFIX), line.get("step"), line.get("reward")
        return Heading(
            name=name,
            kind="evaluation" if line.get("kind") == "evaluation" else "step",
            step=None if step is None else int(step),
            env=str(line["env"]),
            groups=int(line["groups"]),
            trajectories=int(line["trajectories"]),
            reward=None if reward is None else float(reward),
            model=str(line.get("model") or ""),
        )


def _read_lines(file: Path) -> _Lines:
    with _readable(file):
        return _lines(file)


def _readable(file: Path) -> Any:
    return translated(
        (ValueError, TypeError, LookupError, zstandard.ZstdError),
        UserError,
        lambda error: f"{file} cannot be read: {error}; restore it, or move it elsewhere",
    )


def _lines(file: Path, only_first: bool = False) -> _Lines:
    """The lines of a compressed file. The first is a frame of its own."""
    content = bytearray()
    with file.open("rb") as opened:
        rest = b""
        while True:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof:
                piece = rest or opened.read(_PIECE)
                if not piece:
                    raise ValueError("it ends in the middle")
                content += frame.decompress(piece)
                rest = b""
                if len(content) > MOST_BYTES:
                    raise ValueError(_TOO_LARGE)
            rest = frame.unused_data or opened.read(_PIECE)
            if only_first or not rest:
                return _Lines([orjson.loads(line) for line in content.splitlines()], len(content))


def checkpoint_before(checkpoints: Mapping[int, str], version: int) -> tuple[int, str] | None:
    """The newest weights of up to `version` steps, or the oldest if there are none so old."""
    older = [step for step in checkpoints if step <= version]
    step = max(older, default=min(checkpoints, default=None))
    return None if step is None else (step, checkpoints[step])
