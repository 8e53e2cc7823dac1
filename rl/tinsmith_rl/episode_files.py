"""Writes the episodes of a run to files, for `tinsmith view` and for programs.

`DIRECTORY/NAME.jsonl.zst` is compressed with Zstandard and holds a line of JSON for each thing: first the file itself
(`_heading`), then each trajectory (`_trajectory`), with its samples (`_sample`). `DIRECTORY/images/SHA256.FORMAT` is
an image, written once however many episodes show it. docs/rl.md lists the fields.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.sequences import EncodedImage
from tinsmith_rl.trajectory import TrainingSample, Trajectory

FORMAT = 1
"""Version of the files."""
DIRECTORY = "trajectories"
"""Name of the directory, below that of the run."""
_SUFFIX = ".jsonl.zst"
_LEVEL = 3
_HEADING_BYTES = 4096
_KEPT_SHARE = 0.9
"""Part of the limit that is left once files are deleted, so that this is seldom done."""


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of a step for one sample."""

    advantages: NDArray[np.float32]
    """[r] over the response, with all corrections; 0.0 where nothing was sampled."""
    trainer: NDArray[np.float32] | None
    """[r] the trainer's logprobs when it first computed the sample; None if it never did."""


Lessons = Mapping[int, Sequence[Learned]]
"""Lessons of the samples of each trajectory, by the trajectory's place in the file."""


class EpisodeFiles:
    """The files of one run. The oldest are deleted once all together are larger than `most_bytes`; 0 keeps all."""

    def __init__(self, directory: Path, most_bytes: int, template: ChatTemplate) -> None:
        self.directory, self.most_bytes, self.template = directory, most_bytes, template
        (directory / "images").mkdir(parents=True, exist_ok=True)
        self._images = {entry.name for entry in os.scandir(directory / "images")}
        self._bytes = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())

    def write(
        self,
        name: str,
        trajectories: Sequence[Trajectory],
        lessons: Lessons | None = None,
        **about: Any,
    ) -> None:
        """Write the episodes of one step or evaluation, which `about` describes, in place of a file of that name."""
        images = {
            _image_name(placed.image): placed.image
            for trajectory in trajectories
            for sample in trajectory.samples
            for placed in sample.sequence.images
        }
        for file_name in images.keys() - self._images:
            self._write(self.directory / "images" / file_name, images[file_name].data)
            self._images.add(file_name)
        compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        heading = _heading(trajectories, sorted(images)) | {"name": name} | about
        lines = (
            orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
            for line in self._lines(trajectories, lessons or {})
        )
        # Two frames: the heading can be read alone
        content = compress(orjson.dumps(heading, option=orjson.OPT_APPEND_NEWLINE)) + compress(b"".join(lines))
        newest = self.directory / f"{name}{_SUFFIX}"
        self._write(newest, content)
        if self.most_bytes and self._bytes > self.most_bytes:
            self._delete_oldest(newest)

    def _lines(self, trajectories: Sequence[Trajectory], lessons: Lessons) -> Iterator[dict[str, Any]]:
        for place, trajectory in enumerate(trajectories):
            learnt: Sequence[Learned | None] = lessons.get(place) or [None] * len(trajectory.samples)
            samples = [
                _sample(sample, self.template, lesson)
                for sample, lesson in zip(trajectory.samples, learnt, strict=True)
            ]
            yield _trajectory(trajectory) | {"samples": samples}

    def _write(self, file: Path, content: bytes) -> None:
        replaced = file.stat().st_size if file.exists() else 0
        new = file.with_name(f"{file.name}.new")
        new.write_bytes(content)
        new.replace(file)
        self._bytes += len(content) - replaced

    def _delete_oldest(self, newest: Path) -> None:
        files = sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda file: (file == newest, file.stat().st_mtime_ns))
        headings = {file: read_heading(file) for file in files}
        size_of = {name: (self.directory / "images" / name).stat().st_size for name in self._images}
        users = {name: sum(name in heading["images"] for heading in headings.values()) for name in self._images}
        for file in files[:-1]:
            if self._bytes <= self.most_bytes * _KEPT_SHARE:
                break
            self._bytes -= file.stat().st_size
            file.unlink()
            for name in headings[file]["images"]:
                users[name] -= 1
        for name in [name for name, count in users.items() if not count]:
            (self.directory / "images" / name).unlink()
            self._images.discard(name)
            self._bytes -= size_of[name]


def read_heading(file: Path) -> dict[str, Any]:
    """The first line of a file."""
    with file.open("rb") as opened:
        frame, heading = zstandard.ZstdDecompressor().decompressobj(), b""
        while not frame.eof:
            heading += frame.decompress(opened.read(_HEADING_BYTES))
        return dict(orjson.loads(heading))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The trajectories of a file, as they were written."""
    with file.open("rb") as opened:
        reader = zstandard.ZstdDecompressor().stream_reader(opened, read_across_frames=True)
        return [orjson.loads(line) for line in reader.read().splitlines()[1:]]


def _heading(trajectories: Sequence[Trajectory], images: Sequence[str]) -> dict[str, Any]:
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.usable]
    return {
        "format": FORMAT,
        "env": trajectories[0].episode.env if trajectories else "",
        "trajectories": len(trajectories),
        "groups": len({trajectory.episode.group for trajectory in trajectories}),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "images": images,
    }


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        **vars(trajectory.episode),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "usable": trajectory.usable,
        "error": trajectory.error,
        "details": trajectory.details,
        "turns": trajectory.turns,
        "metrics": dict(trajectory.metrics),
        "seconds": dict(trajectory.seconds),
        "notes": {name: repr(value) for name, value in trajectory.notes.items()},
    }


def _sample(sample: TrainingSample, template: ChatTemplate, learned: Learned | None) -> dict[str, Any]:
    first, mask = sample.prompt_length, sample.loss_mask
    pieces = _pieces(sample, template)
    return {
        "ids": sample.sequence.ids,
        "prompt_length": first,
        "text": "".join(pieces),
        "lengths": list(map(len, pieces)),
        "sampled": [[first + start, first + stop] for start, stop in _runs(mask)],
        "rewards": [[first + int(at), float(sample.rewards[at])] for at in np.flatnonzero(sample.rewards)],
        "logprobs": sample.logprobs[mask],
        "trainer_logprobs": None if learned is None or learned.trainer is None else learned.trainer[mask],
        "advantages": None if learned is None else learned.advantages[mask],
        "images": [
            {"offset": placed.offset, "tokens": placed.image.tokens, "file": _image_name(placed.image)}
            for placed in sample.sequence.images
        ],
        "is_last_step": sample.is_last_step,
    }


def _pieces(sample: TrainingSample, template: ChatTemplate) -> list[str]:
    """[n] the text of each token; that of an image's positions is empty."""
    ids, pieces, at = sample.sequence.ids.tolist(), list[str](), 0
    for placed in sample.sequence.images:
        pieces += template.pieces(ids[at : placed.offset]) + [""] * placed.image.tokens
        at = placed.offset + placed.image.tokens
    return pieces + template.pieces(ids[at:])


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The beginnings and ends of runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(start, stop) for start, stop in list(pairwise(edges.tolist()))[::2]]


def _image_name(image: EncodedImage) -> str:
    return f"{image.digest}.{image.format}"
