"""Every way in which an episode runs and ends, on a plain and a thinking template: the exact tokens, mask, rewards and logprobs.

Invariant: Every ending of an episode gives the exact tokens, mask, rewards and logprobs, on plain and thinking templates.
"""

import asyncio
import base64
import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tinker
from PIL import Image

from tests.extent import slow
from tests.rl.scripted import COUNTS, KEEPS_THOUGHTS, SHOUTS, THINKING, Script, Scripted, ids, settings
from tests.rl.test_run import config_of
from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate, TemplateError
from tinsmith.rl.config import EvaluationSection, ModelSection, from_tree
from tinsmith.rl.env import ChatMessage, Prompt, image_part, text_part, user
from tinsmith.rl.evaluation import evaluation_prompts
from tinsmith.rl.policy import Completion, SamplingRequest, TinkerPolicy, chat_template, context_limit, tokenizer_of
from tinsmith.rl.rollouts import EnvRollouts, file_prompts, prompt_of_group, rollout_settings, seed_prompts
from tinsmith.rl.sequences import Picture
from tinsmith.rl.trajectory import EpisodeId, TrainingSample, Trajectory
from tinsmith.rl.workers import InlineWorkers

Made = tuple[Trajectory, Scripted]
Parts = Sequence[tuple[str | list[int], int, float]]
OPENING = [user("hot or cold?")]
ASKED = "<|im_start|>user\nhot or cold?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_start|>user\nwarmer<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
TWO_TURNS = [([user("warmer")], 0.5, False), ([], 1.0, True)]


def play(
    template: ChatTemplate,
    answers: Sequence[tuple[str | list[int], bool]],
    steps: list[tuple[list[ChatMessage], float, bool]],
    opening: list[ChatMessage] = OPENING,
    **changes: Any,
) -> Made:
    """An episode of scripted answers (text, whether it stopped by itself) and steps."""
    policy = Scripted([(ids(template, said) if isinstance(said, str) else said, stopped) for said, stopped in answers])
    rollouts = EnvRollouts(
        "tests.rl.scripted:Script", {"opening": opening, "steps": steps}, settings(**changes), template, InlineWorkers(600)
    )
    return asyncio.run(rollouts.play(policy, Prompt(5), EpisodeId("script", 5))), policy


def assert_sample(
    sample: TrainingSample, template: ChatTemplate, prompt: str, parts: Parts, last: bool = True, pictures: Sequence[Picture] = ()
) -> None:
    """The whole sample: its prompt, and parts of (text or ids, turn that sampled it or 0, reward on its last token)."""
    response: list[int] = []
    mask: list[bool] = []
    rewards: list[float] = []
    logprobs: list[float] = []
    for said, turn, reward in parts:
        part = ids(template, said) if isinstance(said, str) else said
        response += part
        mask += [turn > 0] * len(part)
        rewards += [0.0] * (len(part) - 1) + [reward]
        logprobs += Scripted.logprobs(turn, len(part)).tolist() if turn else [0.0] * len(part)
    assert sample.prompt_ids.tolist() == ids(template, prompt)
    assert sample.response_ids.tolist() == response
    assert sample.loss_mask.tolist() == mask
    assert sample.rewards.tolist() == rewards
    assert sample.logprobs.tolist() == pytest.approx(logprobs)
    assert sample.is_last_step is last
    assert sample.model_input == input_of(template, ids(template, prompt) + response, pictures)
    assert [placed.picture for placed in sample.sequence.pictures] == list(pictures)


def input_of(template: ChatTemplate, tokens: list[int], pictures: Sequence[Picture] = ()) -> tinker.ModelInput:
    """Text, and behind every `<|vision_start|>` a picture in place of its placeholders."""
    (begin,) = ids(template, "<|vision_start|>")
    chunks: list[tinker.ModelInputChunk] = []
    for picture in pictures:
        at = tokens.index(begin) + 1
        chunks.append(tinker.EncodedTextChunk(tokens=tokens[:at]))
        chunks.append(tinker.types.ImageChunk(data=picture.data, format=picture.format, expected_tokens=picture.tokens))
        tokens = tokens[at + picture.tokens :]
    return tinker.ModelInput(chunks=[*chunks, tinker.EncodedTextChunk(tokens=tokens)])


def only(trajectory: Trajectory) -> TrainingSample:
    (sample,) = trajectory.samples
    return sample


def test_a_plain_template_gives_one_sample_of_all_turns(plain: ChatTemplate) -> None:
    made, policy = play(plain, [("hot" + END, True), ("cold" + END, True)], [([user("warmer")], 0.25, False), ([], 1.0, True)])
    assert Script.heard == ["hot", "cold"]
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.25), ("\n" + NEXT, 0, 0.0), ("cold" + END, 2, 1.0)])
    assert policy.prompts == [tinker.ModelInput.from_ints(ids(plain, text)) for text in (ASKED, ASKED + "hot" + END + "\n" + NEXT)]
    assert (made.stop_reason, made.turns, made.reward, made.sampled_tokens) == ("done", 2, 1.25, len(ids(plain, "hotcold")) + 2)
    assert (made.metrics, made.notes, made.samples[0].turns) == ({"heard": 2.0}, {"seed": 5}, 2)


def test_a_thinking_template_gives_a_sample_for_each_turn(thinking: ChatTemplate) -> None:
    first, second = "ice</think>\n\nhot" + END, "no</think>\n\ncold" + END
    made, policy = play(thinking, [(first, True), (second, True)], [([user("warmer")], 0.25, False), ([], 1.0, True)])
    assert Script.heard == [first.removesuffix(END), second.removesuffix(END)]
    again = ASKED + "hot" + END + "\n" + NEXT + "<think>\n"
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [(first, 1, 0.25)], last=False)
    assert_sample(made.samples[1], thinking, again, [(second, 2, 1.0)])
    assert policy.prompts == [tinker.ModelInput.from_ints(ids(thinking, text)) for text in (ASKED + "<think>\n", again)]
    assert (made.stop_reason, made.turns, made.reward) == ("done", 2, 1.25)


def test_a_thinking_template_that_keeps_thoughts_extends(make_template: Callable[[str], ChatTemplate]) -> None:
    template = make_template(KEEPS_THOUGHTS)
    first, second = "ice</think>\n\nhot" + END, "no</think>\n\ncold" + END
    made, _ = play(template, [(first, True), (second, True)], [([user("warmer")], 0.0, False), ([], 1.0, True)])
    parts = [(first, 1, 0.0), ("\n" + NEXT + "<think>\n", 0, 0.0), (second, 2, 1.0)]
    assert_sample(only(made), template, ASKED + "<think>\n", parts)


def test_turns_are_merged_again_where_the_template_extends(make_template: Callable[[str], ChatTemplate]) -> None:
    # Without a thought begun for it, the model may think or not; what it did not think is not dropped.
    template = make_template(thinking_on_demand())
    said = ["ice</think>\n\nhot" + END, "cold" + END, "hot" + END]
    steps = [([user("warmer")], 0.25, False), ([user("warmer")], 0.5, False), ([], 0.75, True)]
    made, _ = play(template, [(text, True) for text in said], steps)
    assert_sample(made.samples[0], template, ASKED, [(said[0], 1, 0.25)], last=False)
    again = ASKED + "hot" + END + "\n" + NEXT
    assert_sample(made.samples[1], template, again, [(said[1], 2, 0.5), ("\n" + NEXT, 0, 0.0), (said[2], 3, 0.75)])
    assert [sample.turns for sample in made.samples] == [1, 2]


def thinking_on_demand() -> str:
    """The thinking template without the thought that the prompt begins."""
    return KEEPS_THOUGHTS.replace('"<|im_start|>assistant\\n<think>\\n"', '"<|im_start|>assistant\\n"').replace(
        "message.content -", 'message.content.split("</think>")[-1].lstrip("\\n") -', 1
    )


def test_what_was_sampled_is_not_tokenized_again(plain: ChatTemplate) -> None:
    letters, broken = [token for letter in "hot" for token in ids(plain, letter)], ids(plain, "é")[:1]
    assert (plain.decode(letters), plain.decode(broken)) == ("hot", "\N{REPLACEMENT CHARACTER}")
    for sampled in (letters, broken):
        assert sampled != ids(plain, plain.decode(sampled))
        made, _ = play(plain, [([*sampled, *ids(plain, END)], True), ("x" + END, True)], TWO_TURNS)
        assert Script.heard == [plain.decode(sampled), "x"]
        assert_sample(only(made), plain, ASKED, [([*sampled, *ids(plain, END)], 1, 0.5), ("\n" + NEXT, 0, 0.0), ("x" + END, 2, 1.0)])


def test_a_stop_string_gets_the_end_of_turn_that_nobody_sampled(plain: ChatTemplate) -> None:
    made, policy = play(plain, [("hot.", True), ("cold.", True)], TWO_TURNS, stop=(".",))
    parts = [("hot.", 1, 0.5), (END + "\n" + NEXT, 0, 0.0), ("cold.", 2, 1.0), (END, 0, 0.0)]
    assert_sample(only(made), plain, ASKED, parts)
    assert [request.stop for request in policy.requests] == [(".",), (".",)]
    without, _ = play(plain, [("hot.", True), ("cold.", True)], TWO_TURNS, stop=(".",), end_turn_after_stop_string=False)
    assert_sample(only(without), plain, ASKED, [("hot.", 1, 0.5), ("\n" + NEXT, 0, 0.0), ("cold.", 2, 1.0)])


def test_a_stop_string_ends_every_step_of_a_thinking_template(thinking: ChatTemplate) -> None:
    first, second = "ice</think>\n\nhot.", "no</think>\n\ncold."
    again = ASKED + "hot." + END + "\n" + NEXT + "<think>\n"
    made, _ = play(thinking, [(first, True), (second, True)], TWO_TURNS, stop=(".",))
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [(first, 1, 0.5), (END, 0, 0.0)], last=False)
    assert_sample(made.samples[1], thinking, again, [(second, 2, 1.0), (END, 0, 0.0)])
    without, _ = play(thinking, [(first, True), (second, True)], TWO_TURNS, stop=(".",), end_turn_after_stop_string=False)
    assert_sample(without.samples[0], thinking, ASKED + "<think>\n", [(first, 1, 0.5)], last=False)
    assert_sample(without.samples[1], thinking, again, [(second, 2, 1.0)])


def test_another_end_token_stays_and_the_template_s_follows(plain: ChatTemplate) -> None:
    made, _ = play(plain, [("hot<|endoftext|>", True), ("cold" + END, True)], TWO_TURNS)
    assert Script.heard == ["hot", "cold"]
    parts = [("hot<|endoftext|>", 1, 0.5), (END + "\n" + NEXT, 0, 0.0), ("cold" + END, 2, 1.0)]
    assert_sample(only(made), plain, ASKED, parts)


def test_a_generation_of_full_length_ends_the_episode(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    made, policy = play(plain, [("hot or", False)], [([user("warmer")], 0.5, False)])
    assert_sample(only(made), plain, ASKED, [("hot or", 1, 0.5)])
    assert (made.stop_reason, made.truncated) == ("length", True)
    assert policy.requests[0].max_tokens == 10
    made, _ = play(thinking, [("ice</think>\n\nhot" + END, True), ("no, I", False)], [([user("warmer")], 0.5, False), ([], 0.0, True)])
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [("ice</think>\n\nhot" + END, 1, 0.5)], last=False)
    assert_sample(made.samples[1], thinking, ASKED + "hot" + END + "\n" + NEXT + "<think>\n", [("no, I", 2, 0.0)])
    assert made.stop_reason == "length"


def test_a_full_context_ends_the_episode_before_a_turn(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    room = len(ids(plain, ASKED + "hot" + END + "\n" + NEXT))
    made, policy = play(plain, [("hot" + END, True)], TWO_TURNS, max_context=room)
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.5)])
    assert (made.stop_reason, made.truncated, made.turns) == ("context", True, 1)
    _, policy = play(plain, [("hot" + END, True), ("c", False)], TWO_TURNS, max_context=room + 1)
    assert [request.max_tokens for request in policy.requests] == [10, 1]
    said = "ice</think>\n\nhot" + END
    room = len(ids(thinking, ASKED + "hot" + END + "\n" + NEXT + "<think>\n"))
    made, _ = play(thinking, [(said, True)], TWO_TURNS, max_context=room)
    assert_sample(only(made), thinking, ASKED + "<think>\n", [(said, 1, 0.5)])
    assert made.stop_reason == "context"


def test_max_turns_ends_the_episode(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    steps = [([user("warmer")], 0.5, False), ([user("warmer")], 0.25, False)]
    made, _ = play(plain, [("hot" + END, True), ("cold" + END, True)], steps, max_turns=2)
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.5), ("\n" + NEXT, 0, 0.0), ("cold" + END, 2, 0.25)])
    assert (made.stop_reason, made.truncated) == ("max_turns", False)
    made, _ = play(thinking, [("i</think>\n\nhot" + END, True), ("n</think>\n\nice" + END, True)], steps, max_turns=2)
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [("i</think>\n\nhot" + END, 1, 0.5)], last=False)
    assert_sample(made.samples[1], thinking, ASKED + "hot" + END + "\n" + NEXT + "<think>\n", [("n</think>\n\nice" + END, 2, 0.25)])
    assert made.stop_reason == "max_turns"


def test_an_empty_generation_adds_its_reward_to_what_was_sampled_before(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    steps = [([user("warmer")], 0.5, False), ([user("warmer")], 0.25, False), ([], 1.0, True)]
    made, _ = play(plain, [("hot" + END, True), ([], True), ("cold" + END, True)], steps)
    assert Script.heard == ["hot", "", "cold"]
    between = "\n" + NEXT + END + "\n" + NEXT
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.75), (between, 0, 0.0), ("cold" + END, 3, 1.0)])
    made, _ = play(plain, [("hot" + END, True), ([], True)], [steps[0], ([], 0.25, True)])
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.75)])
    said = "ice</think>\n\nhot" + END
    made, _ = play(thinking, [(said, True), ([], True)], [steps[0], ([], 0.25, True)])
    assert_sample(only(made), thinking, ASKED + "<think>\n", [(said, 1, 0.75)])
    assert (made.reward, made.turns, made.stop_reason) == (0.75, 2, "done")
    made, _ = play(thinking, [(said, True), ([], True), ("o</think>\n\ncold" + END, True)], steps)
    again = ASKED + "hot" + END + "\n" + NEXT + "<think>\n"
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [(said, 1, 0.75)], last=False)
    # The thought that nobody went on with stays, so the third turn extends the empty second one.
    parts = [(END + "\n" + NEXT + "<think>\n", 0, 0.0), ("o</think>\n\ncold" + END, 3, 1.0)]
    assert_sample(made.samples[1], thinking, again, parts)


def test_an_episode_of_which_nothing_was_sampled_leaves_nothing_to_learn(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    for template in (plain, thinking):
        empty, _ = play(template, [([], True)], [([], 1.0, True)])
        assert (empty.samples, empty.stop_reason, empty.usable, empty.reward) == ((), "empty", False, 0.0)


def picture(color: str) -> Image.Image:
    return Image.new("RGB", (64, 32), color)


SHOWN = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
"""A picture of `picture`, two tokens."""
LOOK = f"<|im_start|>user\n{SHOWN}hot?<|im_end|>\n<|im_start|>assistant\n"
MORE = f"<|im_start|>user\nand{SHOWN}{SHOWN}<|im_end|>\n<|im_start|>assistant\n"


def test_pictures_of_every_turn_ride_as_chunks(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    opening, second = [user(picture("red"), "hot?")], [user("and", picture("blue"), picture("red"))]
    steps = [(second, 0.5, False), ([], 1.0, True)]
    files = [plain.picture(picture(color)) for color in ("red", "blue", "red")]
    made, policy = play(plain, [("hot" + END, True), ("x" + END, True)], steps, opening)
    parts = [("hot" + END, 1, 0.5), ("\n" + MORE, 0, 0.0), ("x" + END, 2, 1.0)]
    assert_sample(only(made), plain, LOOK, parts, pictures=files)
    again = f"{LOOK}hot{END}\n{MORE}"
    assert policy.prompts == [input_of(plain, ids(plain, LOOK), files[:1]), input_of(plain, ids(plain, again), files)]

    said = ["i</think>\n\nhot" + END, "n</think>\n\nx" + END]
    made, policy = play(thinking, [(text, True) for text in said], steps, opening)
    prompts = [f"{LOOK}<think>\n", f"{again}<think>\n"]
    assert_sample(made.samples[0], thinking, prompts[0], [(said[0], 1, 0.5)], last=False, pictures=files[:1])
    assert_sample(made.samples[1], thinking, prompts[1], [(said[1], 2, 1.0)], pictures=files)
    inputs = [input_of(thinking, ids(thinking, prompt), shown) for prompt, shown in zip(prompts, (files[:1], files), strict=True)]
    assert policy.prompts == inputs


def test_pictures_come_as_images_bytes_or_data_uris(plain: ChatTemplate) -> None:
    file = plain.picture(picture("red"))
    uri = "data:image/png;base64," + base64.b64encode(file.data).decode()
    for part in (image_part(picture("red")), image_part(file.data), image_part(uri), {"type": "image_url", "image_url": {"url": uri}}):
        opening: list[ChatMessage] = [{"role": "user", "content": [part, text_part("hot?")]}]
        made, _ = play(plain, [("hot" + END, True)], [([], 1.0, True)], opening)
        assert_sample(only(made), plain, LOOK, [("hot" + END, 1, 1.0)], pictures=[file])


@pytest.mark.parametrize(("name", "pictures"), [("plain", [3]), ("thinking", [1, 3])])
def test_samples_have_pixel_values_on_request(name: str, pictures: list[int], request: pytest.FixtureRequest) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    opening, steps = [user(picture("red"), "hot?")], [([user(picture("blue"), picture("red"))], 0.5, False), ([], 1.0, True)]
    answers = [("i</think>x" + END, True), ("x" + END, True)]
    made, _ = play(template, answers, steps, opening, pixel_values=True)
    for sample, count in zip(made.samples, pictures, strict=True):
        assert sample.pixel_values is not None
        assert sample.image_grid_thw is not None
        assert sample.pixel_values.shape == (8 * count, 3 * 2 * 16 * 16)
        assert sample.image_grid_thw.tolist() == [[1, 2, 4]] * count
    without, _ = play(template, answers, steps, opening, max_context=2000)
    assert [(sample.pixel_values, sample.image_grid_thw) for sample in without.samples] == [(None, None)] * len(pictures)


def test_a_placeholder_that_the_model_samples_stays_text(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    steps, file = [([user("see", picture("red"))], 0.5, False), ([], 1.0, True)], plain.picture(picture("red"))
    see = f"<|im_start|>user\nsee{SHOWN}<|im_end|>\n<|im_start|>assistant\n"
    said = "hot<|image_pad|>" + END
    made, policy = play(plain, [(said, True), ("x" + END, True)], steps)
    assert Script.heard[0] == "hot<|image_pad|>"
    assert_sample(only(made), plain, ASKED, [(said, 1, 0.5), ("\n" + see, 0, 0.0), ("x" + END, 2, 1.0)], pictures=[file])
    assert policy.prompts[1] == input_of(plain, ids(plain, f"{ASKED}{said}\n{see}"), [file])

    said = "i</think>\n\nhot<|image_pad|>" + END
    made, policy = play(thinking, [(said, True), ("x" + END, True)], steps)
    assert_sample(made.samples[0], thinking, ASKED + "<think>\n", [(said, 1, 0.5)], last=False)
    again = f"{ASKED}hot<|image_pad|>{END}\n{see}<think>\n"
    assert_sample(made.samples[1], thinking, again, [("x" + END, 2, 1.0)], pictures=[file])
    assert policy.prompts[1] == input_of(thinking, ids(thinking, again), [file])


def test_a_control_token_in_what_the_environment_says_stays_text(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    """Wherever it stands in a message, and whatever it is: nobody can close a turn, open another, or show a picture that is none."""
    tokens = ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"]
    said = "".join(f"a{token}b" for token in tokens)
    steps: list[tuple[list[ChatMessage], float, bool]] = [([user(said)], 0.5, False), ([], 1.0, True)]
    opening: list[ChatMessage] = [
        {"role": "system", "content": said},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [text_part(said), image_part(picture("red"))]},
    ]
    for template in (plain, thinking):
        answers = [("i</think>\n\nhot<|im_start|>" + END, True), ("n</think>\n\ncold" + END, True)]
        made, policy = play(template, answers, steps, opening, max_context=2000)
        print(made.error, made.stop_reason)
        for prompt, turns in ((policy.prompts[0], 4), (policy.prompts[1], 6)):
            seen = [token for chunk in prompt.chunks if isinstance(chunk, tinker.EncodedTextChunk) for token in chunk.tokens]
            sampled = policy.prompts.index(prompt)  # one <|im_start|> of the first answer
            assert [seen.count(ids(template, token)[0]) for token in tokens] == [turns - 1, turns + sampled, 0, 1, 0]
            assert template.decode(seen).count(said) == turns // 2 + 1
        assert made.stop_reason == "done"
    assert plain.ids("a<|im_end|>") == tuple(ids(plain, "a<|im_end|>"))  # elsewhere they are what they are


@pytest.mark.parametrize(("broken", "was", "now"), [(SHOUTS, "'hot'", "'H'"), (COUNTS, "'1'", "'3'")])
def test_a_template_that_changes_what_was_said_is_an_error(
    broken: str, was: str, now: str, make_template: Callable[[str], ChatTemplate]
) -> None:
    template = make_template(broken)
    with pytest.raises(TemplateError, match=rf"token \d+ of the conversation was {was} and is {now}"):
        play(template, [("hot" + END, True)], [([user("warmer")], 0.5, False)])


def test_a_model_without_a_chat_template_is_refused(plain: ChatTemplate) -> None:
    tokenizer = copy.copy(plain.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"^model: the tokenizer '.*' has no chat template; give one with chat_template=FILE"):
        ChatTemplate.for_tokenizer(tokenizer)
    ChatTemplate.for_tokenizer(tokenizer, THINKING)


@pytest.mark.parametrize(
    ("file", "model", "message"),
    [
        ("", "DIR/nothing", "model: tokenizer='.*/nothing' cannot be loaded: .*; give the directory or the Hub id"),
        ('{"eos_token": 3}', "DIR", "model: tokenizer='.*' cannot be loaded: Special token eos_token has to be .*; give the directory"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named(file: str, model: str, message: str, plain: ChatTemplate, tmp_path: Path) -> None:
    shutil.copytree(str(plain.tokenizer.name_or_path), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(file)
    with pytest.raises(ConfigError, match=f"^{message}"):
        tokenizer_of(model.replace("DIR", str(tmp_path)), cast(tinker.TrainingClient, None))


def test_a_template_that_cannot_be_read_is_named(plain: ChatTemplate, tmp_path: Path) -> None:
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    for name in ("bytes.jinja", "nothing.jinja", "."):
        section = ModelSection(chat_template=str(tmp_path / name))
        with pytest.raises(ConfigError, match=r"^model: chat_template='.*' cannot be read: .*; it must be Jinja in UTF-8$"):
            chat_template(section, plain.tokenizer)


def red(width: int = 64, height: int = 32) -> ChatMessage:
    return user(Image.new("RGB", (width, height), "red"))


def holds_itself() -> ChatMessage:
    message: Any = user("hi")
    return cast(ChatMessage, message | {"before": message.setdefault("before", message)})


@pytest.mark.parametrize(
    ("shown", "sees", "error"),
    [
        (red(), False, "takes no images, and the environment showed one"),
        (red(4000, 4), True, "the model takes no picture of 4000 x 4 pixels: absolute aspect ratio must be smaller than 200"),
        (
            user(b"a path"),
            True,
            "Script.{method} returned a picture in {place} that cannot be shown: a picture of 6 bytes",
        ),
        (holds_itself(), True, "RecursionError: maximum recursion depth exceeded"),
        ({"role": "nobody", "content": "hi"}, True, "the chat template cannot render the messages: TemplateError: who is nobody?"),
    ],
)
@pytest.mark.parametrize("opens", [True, False])
def test_what_cannot_be_shown_ends_its_episode_only(
    shown: ChatMessage, sees: bool, error: str, opens: bool, make_template: Callable[[str | None], ChatTemplate]
) -> None:
    """The answer before it is kept."""
    strict = make_template(
        "{%- for m in messages if m.role == 'nobody' -%}{{ raise_exception('who is nobody?') }}{%- endfor -%}" + KEEPS_THOUGHTS
    )
    template = ChatTemplate(strict.tokenizer, strict.processor if sees else None, strict.template)
    made, _ = play(template, [("hot" + END, True)] * 2, [([shown], 0.5, False)], [shown] if opens else OPENING)
    assert (made.stop_reason, made.usable, made.turns) == ("env_error", False, 0 if opens else 1)
    place = "messages[0]" if opens else "observations[0]"
    assert error.format(method="init" if opens else "step", place=place) in made.error
    assert made.details.startswith("prompt: Prompt(seed=5, messages=(), fields={})\n")
    if not opens:
        assert "the model said: 'hot<|im_end|>'\n" in made.details
        reward = 0.0 if "Script." in error else 0.5  # nothing counts of what a wrong step returns
        assert_sample(only(made), template, ASKED + "<think>\n", [("hot" + END, 1, reward)])


def test_an_opening_without_room_for_an_answer_is_a_failure(plain: ChatTemplate) -> None:
    room = len(ids(plain, ASKED))
    made, policy = play(plain, [], [], max_context=room)
    assert (made.stop_reason, made.samples, policy.prompts) == ("env_error", (), [])
    assert made.error.startswith(f"the first messages have {room} tokens, and a conversation has room for {room}; shorten them")
    huge, _ = play(plain, [], [], [red(2000, 2000)], max_context=512)
    assert huge.error.startswith("the first messages have ")


def test_an_answer_that_the_environment_fails_on_is_kept(plain: ChatTemplate) -> None:
    made, _ = play(plain, [("hot" + END, True), ("cold" + END, True)], [([user("warmer")], 0.25, False)])  # no second step: IndexError
    assert (made.stop_reason, made.turns, made.error) == ("env_error", 2, "IndexError: list index out of range")
    assert_sample(only(made), plain, ASKED, [("hot" + END, 1, 0.25), ("\n" + NEXT, 0, 0.0), ("cold" + END, 2, 0.0)])


def test_a_refused_prompt_ends_its_episode_only(server_url: str, plain: ChatTemplate) -> None:
    client = tinker.ServiceClient(base_url=server_url, api_key="tml-test").create_sampling_client(base_model="tiny").result()
    rollouts = EnvRollouts("arithmetic", {}, settings(max_context=10**6, max_tokens=10**6), plain, InlineWorkers(600))
    made = asyncio.run(rollouts.play(TinkerPolicy(client), Prompt(5), EpisodeId("arithmetic", 5)))
    assert made.stop_reason == "env_error"
    assert made.error.startswith("the server refuses the prompt: ")


def test_turns_get_seeds_of_their_own(plain: ChatTemplate) -> None:
    answers, steps = [("hot" + END, True), ("cold" + END, True)], [([user("warmer")], 0.25, False), ([], 1.0, True)]
    first, again, other, free = (play(plain, answers, steps, seed=seed)[1] for seed in (1, 1, 2, None))
    seeds = [[request.seed for request in policy.requests] for policy in (first, again, other, free)]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4
    assert seeds[3] == [None, None]


# Hundreds come and go in the same queue as thousands.
@pytest.mark.parametrize(("in_flight", "episodes"), [(50, 300), *slow((50, 3000), (2000, 3000))])
def test_many_episodes_are_played_and_no_more_at_a_time_than_wanted(in_flight: int, episodes: int, plain: ChatTemplate) -> None:
    at_once, most = 0, 0

    class Slow:
        async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            return Completion(np.array(plain.end_of_turn_ids, np.int32), np.zeros(1, np.float32), True)

    async def play_all() -> list[Trajectory]:
        rollouts = EnvRollouts("arithmetic", {}, settings(), plain, InlineWorkers(600), in_flight=in_flight)
        return await asyncio.gather(*(rollouts.play(Slow(), Prompt(n), EpisodeId("arithmetic", n)) for n in range(episodes)))

    made = asyncio.run(play_all())
    assert most == in_flight
    assert [trajectory.episode.seed for trajectory in made] == list(range(episodes))
    assert all(trajectory.usable for trajectory in made)


CLUE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
RULED: list[ChatMessage] = [{"role": "system", "content": "One word."}, *OPENING]
SYSTEM = "<|im_start|>system\nOne word.<|im_end|>\n"
CLUES = [([user("warmer")], 0.25, False), ([user("colder")], 0.5, False), ([], 1.0, True)]


def test_only_the_newest_turn_and_the_system_message_are_seen(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    made, policy = play(plain, [(word + END, True) for word in ("hot", "ice", "cold")], CLUES, RULED, context_turns=1)
    prompts = [SYSTEM + CLUE.format(clue) for clue in ("hot or cold?", "warmer", "colder")]
    assert policy.prompts == [tinker.ModelInput.from_ints(ids(plain, prompt)) for prompt in prompts]
    for n, (sample, word) in enumerate(zip(made.samples, ("hot", "ice", "cold"), strict=True)):
        assert_sample(sample, plain, prompts[n], [(word + END, n + 1, CLUES[n][1])], last=n == 2)
    said = ["i</think>\n\nhot" + END, "n</think>\n\nice" + END, "o</think>\n\ncold" + END]
    made, _ = play(thinking, [(text, True) for text in said], CLUES, RULED, context_turns=1)
    for n, (sample, text) in enumerate(zip(made.samples, said, strict=True)):
        assert_sample(sample, thinking, prompts[n] + "<think>\n", [(text, n + 1, CLUES[n][1])], last=n == 2)


def test_turns_extend_each_other_until_one_is_forgotten(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    made, _ = play(plain, [(word + END, True) for word in ("hot", "ice", "cold")], CLUES, RULED, context_turns=2)
    both = [("hot" + END, 1, 0.25), ("\n" + NEXT, 0, 0.0), ("ice" + END, 2, 0.5)]
    assert_sample(made.samples[0], plain, SYSTEM + ASKED, both, last=False)
    assert_sample(made.samples[1], plain, SYSTEM + NEXT + "ice" + END + "\n" + CLUE.format("colder"), [("cold" + END, 3, 1.0)])
    said = ["i</think>\n\nhot" + END, "n</think>\n\nice" + END, "o</think>\n\ncold" + END]
    made, _ = play(thinking, [(text, True) for text in said], CLUES, OPENING, context_turns=2)
    prompts = [ASKED, ASKED + "hot" + END + "\n" + NEXT, NEXT + "ice" + END + "\n" + CLUE.format("colder")]
    for n, (sample, text) in enumerate(zip(made.samples, said, strict=True)):
        assert_sample(sample, thinking, prompts[n] + "<think>\n", [(text, n + 1, CLUES[n][1])], last=n == 2)


def test_a_context_that_is_long_enough_changes_nothing(plain: ChatTemplate) -> None:
    answers = [(word + END, True) for word in ("hot", "ice", "cold")]
    whole, limited = (play(plain, answers, CLUES, RULED, context_turns=turns)[0] for turns in (0, 3))
    assert whole.samples[0].response_ids.tolist() == only(limited).response_ids.tolist()


@pytest.mark.parametrize("turns", [1, 2])
def test_pictures_are_forgotten_with_their_turns(turns: int, plain: ChatTemplate) -> None:
    colors = ["red", "blue", "green", "white"]
    system: ChatMessage = {"role": "system", "content": [{"type": "image", "image": picture("black")}]}
    steps: list[tuple[list[ChatMessage], float, bool]] = [([user(picture(color))], 0.0, False) for color in colors[1:]]
    made, policy = play(plain, [("x" + END, True)] * 4, [*steps, ([], 1.0, True)], [system, user(picture("red"))], context_turns=turns)
    seen = [["black", *colors[max(0, n + 1 - turns) : n + 1]] for n in range(4)]
    asked = [[chunk.data for chunk in prompt.chunks if isinstance(chunk, tinker.types.ImageChunk)] for prompt in policy.prompts]
    assert asked == [[plain.picture(picture(color)).data for color in shown] for shown in seen]
    assert [len(sample.sequence.pictures) for sample in made.samples] == ([2] * 4 if turns == 1 else [3] * 3)
    assert made.samples[-1].is_last_step


@pytest.mark.parametrize(
    ("sections", "spare"),
    [
        ({}, 0),
        ({"generation": {"stop": ["\n"]}}, "tail"),
        ({"generation": {"stop": ["\n"], "end_turn_after_stop_string": False}}, 0),
        ({"training": {"kl_coefficient": 0.1}}, 0),
        ({"generation": {"top_p": 0.9}}, 1),
        ({"generation": {"top_k": 5, "stop": ["\n"]}}, "tail and one"),
    ],
)
def test_answers_leave_room_for_what_comes_behind_them(sections: dict[str, Any], spare: int | str, plain: ChatTemplate) -> None:
    tail = len(plain.end_of_turn_ids)
    expected = {"tail": tail, "tail and one": tail + 1}.get(str(spare), spare)
    config = from_tree({"model": {"base_model": "tiny"}, "env": {"name": "arithmetic"}, **sections})
    assert rollout_settings(config, 100, plain).max_context == 100 - int(expected)


@pytest.mark.slow  # a context of tens of thousands of tokens is computed; its length is tested above
def test_the_longest_episode_can_be_scored(server_url: str, plain: ChatTemplate, tmp_path: Any) -> None:
    config = config_of(server_url, tmp_path, model={"base_model": "tiny"}, training={"kl_coefficient": 0.1})
    longest = rollout_settings(config, context_limit(config.server, "tiny"), plain).max_context
    reference = tinker.ServiceClient(base_url=server_url, api_key="tml-test").create_sampling_client(base_model="tiny").result()
    assert len(reference.compute_logprobs(tinker.ModelInput.from_ints([5] * longest)).result()) == longest
    with pytest.raises(tinker.TinkerError, match="exceeds the context window"):
        reference.compute_logprobs(tinker.ModelInput.from_ints([5] * (longest + 1))).result()


def test_prompts_come_in_a_new_order_every_pass() -> None:
    prompts = seed_prompts(100, 4)
    passes = [[prompt_of_group(prompts, 4 * epoch + place, seed=0).seed for place in range(4)] for epoch in range(6)]
    assert all(sorted(one) == [100, 101, 102, 103] for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    assert passes[0] == [prompt_of_group(prompts, place, seed=0).seed for place in range(4)]


def test_prompts_of_a_file_are_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "2 + 2"}], "fields": {"answer": "4"}}\n{"fields": {}}\n')
    assert file_prompts(file, 5) == [Prompt(0, ({"role": "user", "content": "2 + 2"},), {"answer": "4"}), Prompt(1)]
    assert file_prompts(file, 1) == file_prompts(file, 5)[:1]
    file.write_text('{"fields": {}}\n' * 1500)
    assert len(file_prompts(file, 0)) == len(evaluation_prompts(EvaluationSection(file=str(file)))) == 1500
    assert len(evaluation_prompts(EvaluationSection())) == 64
    file.write_text("")
    with pytest.raises(ConfigError, match="it is empty"):
        file_prompts(file, 0)
    file.write_text('{"question": "2 + 2"}\n')
    with pytest.raises(ConfigError, match="row 1: a prompt has the keys messages and fields"):
        file_prompts(file, 5)
    for row in ('{"messages": 3}', '{"messages": ["2 + 2"]}', '{"fields": ["4"]}', '{"messages": null}'):
        file.write_text("{}\n" + row)
        with pytest.raises(ConfigError, match=r"row 2: messages is a list of messages, and fields an object, got {'"):
            file_prompts(file, 5)
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        file_prompts(tmp_path / "nothing", 5)
