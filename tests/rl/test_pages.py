"""What people look at: pages and JSONL with images, masks and rewards; and that an image is processed once."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

from tests.bases import renderer
from tests.rl.scripted import END, chunk_of, play
from tinsmith.models.base import BaseModel
from tinsmith.rendering.processor import LocalProcessor
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.datums import likelihood_datum
from tinsmith_rl.env import user
from tinsmith_rl.pages import write_jsonl, write_page
from tinsmith_rl.trajectory import EpisodeId, Trajectory


def seen(template: ChatTemplate) -> Trajectory:
    """Two turns with an image each; the first answer earns a quarter, the second one."""
    first, second = ([user(Image.new("RGB", (64, 32), color), "hot & cold?")] for color in ("red", "blue"))
    made, _ = play(template, ["hot" + END, "<b>" + END], [(second, 0.25, False), ([], 1.0, True)], first)
    return made


def test_the_page_shows_images_tokens_by_mask_and_rewards_and_nothing_as_markup(
    plain: ChatTemplate, tmp_path: Path
) -> None:
    made = replace(seen(plain), episode=EpisodeId("<i>env", 5), error="KeyError: '<i>error'")
    write_page(tmp_path / "page.html", [made], plain, "<i>title")
    page = (tmp_path / "page.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == 2
    assert '<span class="sampled">hot&lt;|im_end|&gt;</span><b>+0.25</b>' in page
    assert '<span class="sampled">&lt;b&gt;&lt;|im_end|&gt;</span><b>+1</b>' in page
    assert '<span class="read">&lt;|vision_end|&gt;hot &amp; cold?' in page
    assert "reward 1.25 · done · 2 turns · seed 5 · heard 2" in page
    assert [page.count(f"&lt;i&gt;{name}") for name in ("env", "error", "title")] == [1, 1, 2]
    assert "<i>" not in page


def test_jsonl_holds_what_was_trained_on(plain: ChatTemplate, tmp_path: Path) -> None:
    made = seen(plain)
    write_jsonl(tmp_path / "made.jsonl", [made, made], plain)
    first, second = map(json.loads, (tmp_path / "made.jsonl").read_text().splitlines())
    assert first == second
    (sample,) = first["samples"]
    assert sample["prompt_ids"] + sample["response_ids"] == made.samples[0].sequence.ids.tolist()
    assert sample["loss_mask"] == made.samples[0].loss_mask.astype(int).tolist()
    assert [image["sha256"] for image in sample["images"]] == [p.image.digest for p in made.samples[0].sequence.images]
    assert (first["env"], first["seed"], first["reward"], first["metrics"]) == ("script", 5, 1.25, {"heard": 2.0})


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
