"""The cookbook's renderers of Qwen3.5, 3.6 and 3.8, of mixtures of experts and of GPT-OSS, on tiny models' tokenizers,
chat templates and image processors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.bases import image, load, renderer
from tests.recipes.workshop import PYTHON
from tinsmith.models.tiny import TinyKind, write_tiny_model

DENSE = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B")
MODELS: dict[str, TinyKind] = {
    **dict.fromkeys(DENSE, "qwen3-5"),
    "Qwen/Qwen3.6-35B-A3B": "qwen3-5-moe",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3-vl-moe",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-moe",
    "openai/gpt-oss-20b": "gpt-oss",
}
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
    attributes, tokenizer = model_info.get_model_attributes(model), get_tokenizer(model)
    processor = get_image_processor(model) if attributes.is_vl else None
    image = renderers.ImagePart(type="image", image=Image.new("RGB", (width, height), "teal"))
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does mending it cost?"}]
    shown = [{"role": "user", "content": [image, renderers.TextPart(type="text", text="What colour is this?")]}]
    for name in attributes.recommended_renderers:
        renderer = renderers.get_renderer(name, tokenizer, image_processor=processor)
        takes_images = attributes.is_vl and name != "role_colon"
        thinks = takes_images and "disable" not in name and "instruct" not in name
        thinking = renderers.ThinkingPart(type="thinking", thinking="Two coins for one.")
        texts = [renderers.TextPart(type="text", text="Three.")]
        content = [thinking, *texts] if thinks else texts if name.startswith("gpt_oss") else "Three."
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
    """A tiny model under each name."""
    place = tmp_path_factory.mktemp("renderers")
    for name, kind in MODELS.items():
        write_tiny_model(kind, place / name)
    return place


@pytest.fixture(scope="module")
def rendered(directory: Path) -> dict[str, dict[str, Any]]:
    """What each recommended renderer of each model does with a conversation, an answer and an image."""
    command = [str(PYTHON), "-c", RENDER, str(WIDTH), str(HEIGHT), *MODELS]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    kinds = {f"qwen3_8_{kind}" for kind in ("xhigh_reasoning", "medium_reasoning", "low_reasoning", "disable_thinking")}
    kinds |= {
        "qwen3_instruct",
        "qwen3_vl_instruct",
        "role_colon",
        "gpt_oss_no_sysprompt",
        "gpt_oss_medium_reasoning",
        "qwen3_5",
        "qwen3_5_disable_thinking",
        "qwen3_5_preserve_thinking",
    }
    assert {key.split()[1] for key in found} >= kinds
    return found


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory / DENSE[0])


def test_an_answer_that_was_trained_on_follows_its_prompt_and_is_read_back(rendered: dict[str, dict[str, Any]]) -> None:
    for name, found in rendered.items():
        assert found["prompt"] == [found["example"][: -len(found["sampled"])]], name
        assert (found["clean"], found["parsed"]) == (True, found["expected"]), name
        assert found["sampled"][-1] in found["stop"] or found["stop"] == ["\n\nUser:"], name


def test_prompts_are_those_of_the_chat_template(
    rendered: dict[str, dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does mending it cost?"}]
    for option, model, kind in (
        *((True, model, "qwen3_5") for model in ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-35B-A3B")),
        *((False, model, "qwen3_5_disable_thinking") for model in ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-35B-A3B")),
    ):
        found = rendered[f"{model} {kind}"]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=option
        )
        (tokens,) = found["prompt"]
        assert tokens == tokenizer.encode(str(text))
        answer = {"role": "assistant", "content": "Three.", "reasoning_content": "Two coins for one." if option else ""}
        example = str(tokenizer.apply_chat_template([*messages, answer], tokenize=False))
        assert found["example"] == tokenizer.encode(example.removesuffix("\n"))


def test_prompts_of_gpt_oss_are_those_of_its_chat_template(
    rendered: dict[str, dict[str, Any]], directory: Path
) -> None:
    """The template has no system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "openai/gpt-oss-20b")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does mending it cost?"}]
    found = rendered["openai/gpt-oss-20b gpt_oss_no_sysprompt"]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert found["prompt"] == [tokenizer.encode(str(prompt))]
    answer = {"role": "assistant", "content": "Three."}
    assert found["example"] == tokenizer.encode(str(tokenizer.apply_chat_template([*messages, answer], tokenize=False)))


def test_an_image_has_as_many_tokens_as_the_server_counts(rendered: dict[str, dict[str, Any]], directory: Path) -> None:
    shown = [(name.split()[0], found["shown"]) for name, found in rendered.items() if found["shown"] is not None]
    without = {"Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3-30B-A3B-Instruct-2507", "openai/gpt-oss-20b"}
    assert {model for model, _ in shown} == MODELS.keys() - without
    for model, (before, count, after) in shown:
        tokenizer = AutoTokenizer.from_pretrained(directory / model)
        (span,) = renderer(load(directory / model)).render([image(0, width=WIDTH, height=HEIGHT)]).spans
        start, end = tokenizer.encode("<|vision_start|>"), tokenizer.encode("<|vision_end|>")
        assert (before[-1:], count, after[:1]) == (start, span.length, end), model
