"""Files of episodes: what they hold, that they are bounded; and that an image is processed once."""

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from tests.bases import renderer
from tests.rl.scripted import END, chunk_of, play
from tinsmith.models.base import BaseModel
from tinsmith.rendering.processor import LocalProcessor
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.datums import likelihood_datum
from tinsmith_rl.env import user
from tinsmith_rl.episode_files import EpisodeFiles, Learned, read_heading, read_lines
from tinsmith_rl.trajectory import EpisodeId, Trajectory


def seen(template: ChatTemplate) -> Trajectory:
    """Two turns with an image each; the first answer earns a quarter, the second one."""
    first, second = ([user(Image.new("RGB", (64, 32), color), "hot & cold?")] for color in ("red", "blue"))
    made, _ = play(template, ["hot" + END, "<b>" + END], [(second, 0.25, False), ([], 1.0, True)], first)
    return made


def test_a_file_holds_what_was_trained_on_and_what_was_learnt(plain: ChatTemplate, tmp_path: Path) -> None:
    made = replace(seen(plain), episode=EpisodeId("script", 5, version=3))
    (sample,) = made.samples
    mask = sample.loss_mask
    advantages, trainer = mask * np.float32(0.5), np.where(mask, sample.logprobs - 1, 0).astype(np.float32)
    EpisodeFiles(tmp_path, 0, plain).write(
        "step-000004", [made, made], {1: [Learned(advantages, trainer)]}, kind="step", step=4
    )
    heading = read_heading(tmp_path / "step-000004.jsonl.zst")
    assert (heading["name"], heading["kind"], heading["step"], heading["reward"]) == ("step-000004", "step", 4, 1.25)
    first, second = read_lines(tmp_path / "step-000004.jsonl.zst")
    assert (first["env"], first["seed"], first["reward"], first["metrics"]) == ("script", 5, 1.25, {"heard": 2.0})
    assert (first["version"], first["usable"], first["turns"]) == (3, True, 2)
    (untold,), (told,) = first["samples"], second["samples"]
    assert (untold["trainer_logprobs"], untold["advantages"]) == (None, None)
    assert told["ids"] == sample.sequence.ids.tolist()
    assert told["prompt_length"] == sample.prompt_length
    tokens = [token for start, stop in told["sampled"] for token in told["ids"][start:stop]]
    assert tokens == sample.response_ids[mask].tolist()
    assert np.float32(told["logprobs"]).tobytes() == sample.logprobs[mask].tobytes()
    assert np.float32(told["trainer_logprobs"]).tobytes() == trainer[mask].tobytes()
    assert told["advantages"] == [0.5] * len(tokens)
    assert [reward for _, reward in told["rewards"]] == [0.25, 1.0]
    assert [at + 1 for at, _ in told["rewards"]] == [stop for _, stop in told["sampled"]]
    for image, placed in zip(told["images"], sample.sequence.images, strict=True):
        assert (image["offset"], image["tokens"]) == (placed.offset, placed.image.tokens)
        assert (tmp_path / "images" / image["file"]).read_bytes() == placed.image.data
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_every_token_has_its_text(plain: ChatTemplate) -> None:
    """Characters of several tokens stand at the last of them; what is no character stays visible."""
    ids = plain.ids("aé \U0001f600<|im_end|>\n\n  x")
    pieces = plain.pieces(ids)
    assert (len(pieces), "".join(pieces)) == (len(ids), plain.decode(list(ids)))
    face = next(at for at, piece in enumerate(pieces) if "\U0001f600" in piece)
    assert pieces[face - 1] == ""
    assert plain.pieces(plain.ids("\U0001f600")[:-1])[-1].startswith("\N{REPLACEMENT CHARACTER}")


def test_the_oldest_files_are_deleted_with_images_that_nothing_else_shows(plain: ChatTemplate, tmp_path: Path) -> None:
    """Also by a run that goes on in a directory."""
    red, shades = Image.new("RGB", (64, 32), "red"), [Image.new("RGB", (64, 32), (0, 0, shade)) for shade in range(9)]
    played = [play(plain, ["x" + END], [([], 1.0, True)], [user(red, shade, "?")])[0] for shade in shades]
    limit = 20_000
    for number, trajectory in enumerate(played):
        EpisodeFiles(tmp_path, limit, plain).write(f"step-{number:06d}", [trajectory] * 1)
        os.utime(tmp_path / f"step-{number:06d}.jsonl.zst", (number, number))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    each = size // len(played)
    EpisodeFiles(tmp_path, 4 * each, plain).write("step-000009", [played[-1]])
    left = sorted(file.name for file in tmp_path.glob("*.zst"))
    assert left[-1] == "step-000009.jsonl.zst"
    assert 1 < len(left) < 5
    assert left == [f"step-{number:06d}.jsonl.zst" for number in range(10 - len(left), 10)]
    shown = {image for name in left for image in read_heading(tmp_path / name)["images"]}
    assert {file.name for file in (tmp_path / "images").iterdir()} == shown
    assert f"{played[0].samples[0].sequence.images[0].image.digest}.png" in shown


@pytest.mark.parametrize("name", ["plain", "thinking"])
def test_every_image_of_a_trajectory_is_processed_once(
    name: str, request: pytest.FixtureRequest, vision_base: BaseModel
) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    red, blue, green = ([user(Image.new("RGB", (64, 32), color))] for color in ("red", "blue", "green"))
    made, policy = play(
        template, ["i</think>x" + END] * 3, [(blue, 0.0, False), (green, 0.0, False), ([], 1.0, True)], red
    )
    render = renderer(vision_base)
    with patch.object(LocalProcessor, "__call__", autospec=True, side_effect=LocalProcessor.__call__) as processing:
        for model_input in [*policy.prompts, *(likelihood_datum(sample).model_input for sample in made.samples)]:
            rendered = render.render([chunk_of(chunk) for chunk in model_input.chunks])
            assert len(rendered.token_ids) == model_input.length
    processed = [call.args[1] for call in processing.call_args_list]  # digests
    assert len(processed) == len(set(processed)) == 3
    assert len(made.samples) == (3 if name == "thinking" else 1)
