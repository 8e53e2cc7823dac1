"""What people look at: pages with pictures, masks and rewards; trackers; and that a picture is worked on once."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tests.bases import renderer
from tests.rl.scripted import chunk_of
from tests.rl.test_generator import play
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, PictureInput
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.datums import likelihood_datum
from tinsmith.rl.env import user
from tinsmith.rl.pages import write_jsonl, write_page
from tinsmith.rl.trackers import make_trackers
from tinsmith.rl.trajectory import Trajectory

END = "<|im_end|>"


def seen(template: ChatTemplate) -> Trajectory:
    """Two turns with a picture each; the first answer earns a quarter, the second one."""
    first, second = ([user(Image.new("RGB", (64, 32), color), "hot & cold?")] for color in ("red", "blue"))
    made, _ = play(template, [("hot" + END, True), ("<b>" + END, True)], [(second, 0.25, False), ([], 1.0, True)], first)
    return made


def test_the_page_shows_pictures_tokens_by_mask_and_rewards(plain: ChatTemplate, tmp_path: Path) -> None:
    made = seen(plain)
    write_page(tmp_path / "page.html", [made], plain, "two turns")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img src='data:image/png;base64,") == 2
    assert "<span class='said'>hot&lt;|im_end|&gt;</span><b>+0.25</b>" in page
    assert "<span class='said'>&lt;b&gt;&lt;|im_end|&gt;</span><b>+1</b>" in page
    assert "<span class='read'>&lt;|vision_end|&gt;hot &amp; cold?" in page
    assert "reward 1.25 · done · 2 turns · seed 5 · heard 2" in page


def test_jsonl_holds_what_was_trained_on(plain: ChatTemplate, tmp_path: Path) -> None:
    made = seen(plain)
    write_jsonl(tmp_path / "made.jsonl", [made, made], plain)
    first, second = map(json.loads, (tmp_path / "made.jsonl").read_text().splitlines())
    assert first == second
    (sample,) = first["samples"]
    assert sample["prompt_ids"] + sample["response_ids"] == made.samples[0].stream.ids.tolist()
    assert sample["loss_mask"] == made.samples[0].loss_mask.astype(int).tolist()
    assert [picture["sha256"] for picture in sample["pictures"]] == [p.picture.digest for p in made.samples[0].stream.pictures]
    assert (first["env"], first["seed"], first["reward"], first["metrics"]) == ("script", 5, 1.25, {"heard": 2.0})


def test_trackers_log_to_their_places(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    for tracker in make_trackers(["console", "tensorboard"], tmp_path, 0, {}, console):
        for step in range(3):
            tracker.log(step, {"reward": step / 4})
        tracker.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][2] == {"step": 2, "reward": 0.5}
    assert "step    2  reward 0.500" in console.export_text()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"reward") >= 3
    before = (tmp_path / "metrics.jsonl").read_text()
    (tracker,) = make_trackers([], tmp_path, 1, {}, console)
    assert (tmp_path / "metrics.jsonl").read_text() == before  # until there is something in the place of the steps that are done again
    tracker.log(1, {"reward": 5.0})
    tracker.log(2, {"reward": 6.0})
    again = '{"step": 0, "reward": 0.0}\n{"step": 1, "reward": 5.0}\n{"step": 2, "reward": 6.0}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == again


def test_a_line_that_a_killed_run_did_not_finish_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n{"step": 1, "rew')
    (tracker,) = make_trackers([], tmp_path, 2, {}, Console())
    tracker.log(2, {"reward": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "reward": 0.5}\n{"step": 2, "reward": 1.0}\n'


def test_trackers_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="trackers: 'paper' is not known; known are console, tensorboard, wandb and trackio"):
        make_trackers(["paper"], tmp_path, 0, {}, Console())
    with pytest.raises(ConfigError, match="trackers: 'wandb' is not installed; install it with: pip install wandb"):
        make_trackers(["wandb"], tmp_path, 0, {}, Console())


@pytest.mark.parametrize("name", ["plain", "thinking"])
def test_every_picture_of_a_trajectory_is_processed_once(name: str, request: pytest.FixtureRequest, vision_base: BaseModel) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    pictures = [Image.new("RGB", (64, 32), color) for color in ("red", "blue", "green")]
    steps = [([user(pictures[1])], 0.0, False), ([user(pictures[2])], 0.0, False), ([], 1.0, True)]
    made, policy = play(template, [("i</think>x" + END, True)] * 3, steps, [user(pictures[0], "hot?")])
    render = renderer(vision_base)
    assert render.processor is not None
    own, processed = render.processor, []

    def counted(digest: bytes, image: Image.Image) -> PictureInput:
        processed.append(digest)
        return own(digest, image)

    render.processor = counted
    for model_input in [*policy.prompts, *(likelihood_datum(sample).model_input for sample in made.samples)]:
        rendered = render.render([chunk_of(chunk) for chunk in model_input.chunks])
        assert len(rendered.token_ids) == model_input.length
    assert len(processed) == len(set(processed)) == 3
    assert len(made.samples) == (3 if name == "thinking" else 1)
