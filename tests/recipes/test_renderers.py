"""The cookbook's renderers of Qwen3.5, 3.6 and 3.8 on a tiny model's tokenizer, chat template and image processor."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.bases import image, load, renderer
from tests.recipes.workshop import PYTHON
from tinsmith.models.tiny import write_tiny_model

MODELS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B")
WIDTH, HEIGHT = 96, 64

RENDER = """
import json, sys
import tinker
from PIL import Image
from tinker_cookbook import model_info, renderers
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.tokenizer_utils import get_tokenizer

def joined(model_input):  # neighbouring texts as one list of tokens, images as their number of tokens
    parts = [[]]
    for chunk in model_input.chunks:
        if isinstance(chunk, tinker.types.ImageChunk):
            parts += [chunk.expected_tokens, []]
        else:
            parts[-1] += chunk.tokens
    return parts

width, height = int(sys.argv[1]), int(sys.argv[2])
found = {}
for model in sys.argv[3:]:
    tokenizer, processor = get_tokenizer(model), get_image_processor(model)
    image = renderers.ImagePart(type="image", image=Image.new("RGB", (width, height), "teal"))
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does mending it cost?"}]
    shown = [{"role": "user", "content": [image, renderers.TextPart(type="text", text="What colour is this?")]}]
    for name in model_info.get_model_attributes(model).recommended_renderers:
        renderer = renderers.get_renderer(name, tokenizer, image_processor=processor)
        takes_images = name != "role_colon"
        thinks = takes_images and "disable" not in name
        thinking = renderers.ThinkingPart(type="thinking", thinking="Two coins for one.")
        content = [thinking, renderers.TextPart(type="text", text="Three.")] if thinks else "Three."
        answer = {"role": "assistant", "content": content}
        datum, weights = renderer.build_supervised_example([*question, answer])
        (tokens,) = joined(datum)
        sampled = [token for token, weight in zip(tokens, weights.tolist(), strict=True) if weight]
        message, ending = renderer.parse_response(sampled)
        found[f"{model} {name}"] = {
            "prompt": joined(renderer.build_generation_prompt(question)),
            "shown": joined(renderer.build_generation_prompt(shown)) if takes_images else None,
            "example": tokens,
            "sampled": sampled,
            "parsed": message["content"],
            "expected": answer["content"],
            "clean": ending.is_clean,
            "stop": renderer.get_stop_sequences(),
        }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tiny model under all names."""
    place = tmp_path_factory.mktemp("renderers")
    for name in MODELS:
        write_tiny_model("qwen3-5", place / name)
    return place


@pytest.fixture(scope="module")
def rendered(directory: Path) -> dict[str, dict[str, Any]]:
    """What each recommended renderer of each model does with a conversation, an answer and an image."""
    command = [str(PYTHON), "-c", RENDER, str(WIDTH), str(HEIGHT), *MODELS]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    kinds = {f"qwen3_8_{kind}" for kind in ("xhigh_reasoning", "medium_reasoning", "low_reasoning", "disable_thinking")}
    kinds |= {"role_colon", "qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"}
    assert {key.split()[1] for key in found} >= kinds
    return found


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory / MODELS[0])


def test_an_answer_that_was_trained_on_follows_its_prompt_and_is_read_back(rendered: dict[str, dict[str, Any]]) -> None:
    for name, found in rendered.items():
        assert found["prompt"] == [found["example"][: -len(found["sampled"])]], name
        assert (found["clean"], found["parsed"]) == (True, found["expected"]), name
        assert found["sampled"][-1] == found["stop"][-1] or found["stop"] == ["\n\nUser:"], name


def test_prompts_are_those_of_the_chat_template(
    rendered: dict[str, dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does mending it cost?"}]
    for option, name in ((True, "qwen3_5"), (False, "qwen3_5_disable_thinking")):
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=option
        )
        (tokens,) = rendered[f"Qwen/Qwen3.5-4B {name}"]["prompt"]
        assert tokens == tokenizer.encode(str(text))
        answer = {"role": "assistant", "content": "Three.", "reasoning_content": "Two coins for one." if option else ""}
        example = str(tokenizer.apply_chat_template([*messages, answer], tokenize=False))
        assert rendered[f"Qwen/Qwen3.5-4B {name}"]["example"] == tokenizer.encode(example.removesuffix("\n"))


def test_a_image_has_as_many_tokens_as_the_server_counts(
    rendered: dict[str, dict[str, Any]], directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (span,) = renderer(load(directory / MODELS[0])).render([image(0, width=WIDTH, height=HEIGHT)]).spans
    start, end = tokenizer.encode("<|vision_start|>"), tokenizer.encode("<|vision_end|>")
    shown = [found["shown"] for found in rendered.values() if found["shown"] is not None]
    assert len(shown) == len(rendered) - 1
    for before, count, after in shown:
        assert (before[-1:], count, after[:1]) == (start, span.length, end)
