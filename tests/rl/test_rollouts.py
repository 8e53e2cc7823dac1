"""Every way in which an episode runs and ends, on a plain and a thinking template: exact tokens and numbers.

Invariant: Every ending of an episode gives the exact tokens, mask, rewards and logprobs, on plain and thinking
templates.
"""

import asyncio
import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tinker
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizer

from tests.rl.scripted import (
    COUNTS,
    END,
    KEEPS_THOUGHTS,
    ON_DEMAND,
    OPENING,
    SHOUTS,
    THINKING,
    Script,
    Scripted,
    ids,
    play,
    settings,
)
from tests.rl.test_run import config_of
from tinsmith_rl.chat import ChatTemplate, Conversation, TemplateError
from tinsmith_rl.config import ModelSection, from_tree
from tinsmith_rl.configured_rollouts import rollout_settings
from tinsmith_rl.env import ChatMessage, Prompt, image_part, text_part, user
from tinsmith_rl.errors import ConfigError, UserError
from tinsmith_rl.policy import Completion, SamplingRequest, TinkerPolicy, chat_template, context_limit, tokenizer_of
from tinsmith_rl.prompts import file_prompts, prompt_of_group, prompts_of, seed_prompts
from tinsmith_rl.rollouts import EnvRollouts
from tinsmith_rl.sequences import EncodedImage
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import InlineWorkers

MakeTemplate = Callable[[str | None], ChatTemplate]
Steps = list[tuple[list[ChatMessage], float, bool]]
Sample = list[Any]
"""A sample: its prompt, then unsampled texts and (text or tokens, turn that sampled it, reward at its end)."""


def asks(text: str) -> str:
    """A turn of the environment, and where the model's begins."""
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


def image(color: str) -> Image.Image:
    return Image.new("RGB", (64, 32), color)


ASKED, WARMER, COLDER, THINK = asks("hot or cold?"), "\n" + asks("warmer"), "\n" + asks("colder"), "<think>\n"
HOT, ICE, COLD = (word + END for word in ("hot", "ice", "cold"))
DEEP_HOT, DEEP_ICE, DEEP_COLD = (f"hm</think>\n\n{word}" for word in (HOT, ICE, COLD))
AGAIN = ASKED + HOT + WARMER + THINK
"""The thinking template in the second turn."""
TWO: Steps = [([user("warmer")], 0.5, False), ([], 1.0, True)]
THREE: Steps = [([user("warmer")], 0.25, False), ([user("colder")], 0.5, False), ([], 1.0, True)]
ENDLESS: Steps = [([user("warmer")], 0.5, False), ([user("colder")], 0.25, False)]
RULED: list[ChatMessage] = [{"role": "system", "content": "One word."}, *OPENING]
RULE = f"<|im_start|>system\nOne word.{END}\n"
SHOWN = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
"""An image of two tokens."""
LOOK, MORE, SEE = asks(f"{SHOWN}hot?"), "\n" + asks(f"and{SHOWN}{SHOWN}"), "\n" + asks(f"see{SHOWN}")
RED: dict[str, Any] = {"opening": [user(image("red"), "hot?")], "shows": ["red", "blue", "red"]}
IMAGES: Steps = [([user("and", image("blue"), image("red"))], 0.5, False), ([], 1.0, True)]
SEEN: Steps = [([user("see", image("red"))], 0.5, False), ([], 1.0, True)]
FAKE = "hot<|image_pad|>" + END


@dataclass
class Episode:
    """What is said in an episode, on which template, and what it gives."""

    template: str | None
    said: list[str | list[int]]
    steps: Steps
    changes: dict[str, Any]
    """Of `play`; also `fills`, the text that fills the context, and `shows`, the colours of its images."""
    samples: tuple[Sample, ...] = ()
    ending: str = "done"

    def gives(self, *samples: Sample, ending: str = "done") -> "Episode":
        return replace(self, samples=samples, ending=ending)


def episode(template: str | None, said: list[Any], steps: Steps, **changes: Any) -> Episode:
    return Episode(template, said, steps, changes)


EPISODES = {
    "plain": episode(None, [HOT, COLD], TWO).gives([ASKED, (HOT, 1, 0.5), WARMER, (COLD, 2, 1.0)]),
    "thinking": episode(THINKING, [DEEP_HOT, DEEP_COLD], TWO).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.5)], [AGAIN, (DEEP_COLD, 2, 1.0)]
    ),
    "thoughts are kept": episode(KEEPS_THOUGHTS, [DEEP_HOT, DEEP_COLD], TWO).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.5), WARMER + THINK, (DEEP_COLD, 2, 1.0)]
    ),
    "merged again where the template extends": episode(ON_DEMAND, [DEEP_HOT, COLD, HOT], THREE).gives(
        [ASKED, (DEEP_HOT, 1, 0.25)], [ASKED + HOT + WARMER, (COLD, 2, 0.5), COLDER, (HOT, 3, 1.0)]
    ),
    "a stop string gets the end of turn that nobody sampled": episode(None, ["hot.", "cold."], TWO, stop=(".",)).gives(
        [ASKED, ("hot.", 1, 0.5), END + WARMER, ("cold.", 2, 1.0), END]
    ),
    "a stop string is the end": episode(
        None, ["hot.", "cold."], TWO, stop=(".",), end_turn_after_stop_string=False
    ).gives([ASKED, ("hot.", 1, 0.5), WARMER, ("cold.", 2, 1.0)]),
    "a stop string ends each sample": episode(THINKING, ["hm</think>\n\nhot.", "no"], TWO, stop=(".",)).gives(
        [ASKED + THINK, ("hm</think>\n\nhot.", 1, 0.5), END],
        [ASKED + "hot." + END + WARMER + THINK, ("no", 2, 1.0), END],
    ),
    "another end token": episode(None, ["hot<|endoftext|>", COLD], TWO).gives(
        [ASKED, ("hot<|endoftext|>", 1, 0.5), END + WARMER, (COLD, 2, 1.0)]
    ),
    "cut": episode(None, ["hot or"], ENDLESS, stopped=False).gives([ASKED, ("hot or", 1, 0.5)], ending="length"),
    "cut in a second sample, though done": episode(THINKING, [DEEP_HOT, "no, I"], TWO, stopped=False).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.5)], [AGAIN, ("no, I", 2, 1.0)], ending="length"
    ),
    "full": episode(None, [HOT], TWO, fills=ASKED + HOT + WARMER).gives([ASKED, (HOT, 1, 0.5)], ending="context"),
    "full of thoughts": episode(THINKING, [DEEP_HOT], TWO, fills=AGAIN).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.5)], ending="context"
    ),
    "last turn": episode(None, [HOT, COLD], ENDLESS, max_turns=2).gives(
        [ASKED, (HOT, 1, 0.5), WARMER, (COLD, 2, 0.25)], ending="max_turns"
    ),
    "last thought": episode(THINKING, [DEEP_HOT, DEEP_ICE], ENDLESS, max_turns=2).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.5)], [AGAIN, (DEEP_ICE, 2, 0.25)], ending="max_turns"
    ),
    "the reward of an empty end": episode(None, [HOT, []], TWO).gives([ASKED, (HOT, 1, 1.5)]),
    "the reward of an empty thought": episode(THINKING, [DEEP_HOT, []], TWO).gives([ASKED + THINK, (DEEP_HOT, 1, 1.5)]),
    "the reward of an empty turn": episode(None, [HOT, [], COLD], THREE).gives(
        [ASKED, (HOT, 1, 0.75), WARMER + END + COLDER, (COLD, 3, 1.0)]
    ),
    # The thought that nobody went on with stays, so the third turn extends the second.
    "an empty thought is extended": episode(THINKING, [DEEP_HOT, [], DEEP_COLD], THREE).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.75)], [AGAIN, END + COLDER + THINK, (DEEP_COLD, 3, 1.0)]
    ),
    "nothing": episode(None, [[]], [([], 1.0, True)]).gives(ending="empty"),
    "no thought": episode(THINKING, [[]], [([], 1.0, True)]).gives(ending="empty"),
    "an answer on which the environment fails": episode(None, [HOT, COLD], TWO[:1]).gives(
        [ASKED, (HOT, 1, 0.5), WARMER, (COLD, 2, 0.0)], ending="env_error"
    ),
    "one turn and the system message": episode(None, [HOT, ICE, COLD], THREE, opening=RULED, context_turns=1).gives(
        [RULE + ASKED, (HOT, 1, 0.25)], [RULE + asks("warmer"), (ICE, 2, 0.5)], [RULE + asks("colder"), (COLD, 3, 1.0)]
    ),
    "two turns": episode(None, [HOT, ICE, COLD], THREE, opening=RULED, context_turns=2).gives(
        [RULE + ASKED, (HOT, 1, 0.25), WARMER, (ICE, 2, 0.5)], [RULE + asks("warmer") + ICE + COLDER, (COLD, 3, 1.0)]
    ),
    "two turns of thoughts": episode(THINKING, [DEEP_HOT, DEEP_ICE, DEEP_COLD], THREE, context_turns=2).gives(
        [ASKED + THINK, (DEEP_HOT, 1, 0.25)],
        [AGAIN, (DEEP_ICE, 2, 0.5)],
        [asks("warmer") + ICE + COLDER + THINK, (DEEP_COLD, 3, 1.0)],
    ),
    "as many turns as there are": episode(None, [HOT, ICE, COLD], THREE, opening=RULED, context_turns=3).gives(
        [RULE + ASKED, (HOT, 1, 0.25), WARMER, (ICE, 2, 0.5), COLDER, (COLD, 3, 1.0)]
    ),
    "images": episode(None, [HOT, COLD], IMAGES, **RED).gives([LOOK, (HOT, 1, 0.5), MORE, (COLD, 2, 1.0)]),
    "images and thoughts": episode(THINKING, [DEEP_HOT, DEEP_COLD], IMAGES, **RED).gives(
        [LOOK + THINK, (DEEP_HOT, 1, 0.5)], [LOOK + HOT + MORE + THINK, (DEEP_COLD, 2, 1.0)]
    ),
    "a sampled placeholder is text": episode(None, [FAKE, COLD], SEEN, shows=["red"]).gives(
        [ASKED, (FAKE, 1, 0.5), SEE, (COLD, 2, 1.0)]
    ),
    "a placeholder behind a thought is text": episode(
        THINKING, ["hm</think>\n\n" + FAKE, COLD], SEEN, shows=["red"]
    ).gives([ASKED + THINK, ("hm</think>\n\n" + FAKE, 1, 0.5)], [ASKED + FAKE + SEE + THINK, (COLD, 2, 1.0)]),
}


@pytest.mark.parametrize("case", EPISODES.values(), ids=EPISODES)
def test_an_episode_gives_exactly_these_samples(case: Episode, make_template: MakeTemplate) -> None:
    template, changes = make_template(case.template), dict(case.changes)
    images = [template.image(image(color)) for color in changes.pop("shows", [])]
    if "fills" in changes:
        changes["max_context"] = len(ids(template, changes.pop("fills")))
    made, policy = play(template, case.said, case.steps, **changes)
    assert (made.stop_reason, made.truncated) == (case.ending, case.ending in ("length", "context"))
    assert made.usable == (case.ending not in ("empty", "env_error"))
    assert_samples(made, policy, template, case.samples, images)
    if case.samples:
        texts = [
            text.removesuffix(END).removesuffix("<|endoftext|>") if isinstance(text, str) else "" for text in case.said
        ]
        assert (Script.heard, made.turns) == (texts, len(case.said))
        assert made.reward == sum(part[2] for sample in case.samples for part in sample if isinstance(part, tuple))


def assert_samples(
    made: Trajectory,
    policy: Scripted,
    template: ChatTemplate,
    samples: Sequence[Sample],
    images: Sequence[EncodedImage] = (),
) -> None:
    """Each sample is that, token by token, and was sampled from exactly what stands before in it."""
    for sample, (prompt, *parts) in zip(made.samples, samples, strict=True):
        tokens = ids(template, prompt)
        mask: list[bool] = []
        rewards: list[float] = []
        logprobs: list[float] = []
        for said, turn, reward in ((part, 0, 0.0) if isinstance(part, str) else part for part in parts):
            if turn:
                assert policy.prompts[turn - 1] == input_of(template, tokens, images)
            part = ids(template, said) if isinstance(said, str) else said
            tokens = tokens + part
            mask += [turn > 0] * len(part)
            rewards += [0.0] * (len(part) - 1) + [reward]
            logprobs += Scripted.logprobs(turn, len(part)).tolist() if turn else [0.0] * len(part)
        assert (sample.prompt_ids.tolist(), sample.sequence.ids.tolist()) == (ids(template, prompt), tokens)
        assert (sample.loss_mask.tolist(), sample.rewards.tolist()) == (mask, rewards)
        assert sample.logprobs.tolist() == pytest.approx(logprobs)
        assert sample.model_input == input_of(template, tokens, images)
        assert sample.is_last_step is (sample is made.samples[-1])


def input_of(template: ChatTemplate, tokens: list[int], images: Sequence[EncodedImage]) -> tinker.ModelInput:
    """Text, and behind every `<|vision_start|>` the next of these images in place of its placeholders."""
    (begin,) = ids(template, "<|vision_start|>")
    chunks: list[tinker.ModelInputChunk] = []
    for shown in images[: tokens.count(begin)]:
        at = tokens.index(begin) + 1
        chunks.append(tinker.EncodedTextChunk(tokens=tokens[:at]))
        chunks.append(tinker.types.ImageChunk(data=shown.data, format=shown.format, expected_tokens=shown.tokens))
        tokens = tokens[at + shown.tokens :]
    return tinker.ModelInput(chunks=[*chunks, tinker.EncodedTextChunk(tokens=tokens)])


def test_what_was_sampled_is_not_tokenized_again(plain: ChatTemplate) -> None:
    letters, broken = [token for letter in "hot" for token in ids(plain, letter)], ids(plain, "é")[:1]
    assert (plain.decode(letters), plain.decode(broken)) == ("hot", "\N{REPLACEMENT CHARACTER}")
    for sampled in (letters, broken):
        assert sampled != ids(plain, plain.decode(sampled))
        said = [*sampled, *ids(plain, END)]
        made, policy = play(plain, [said, COLD], TWO)
        assert Script.heard == [plain.decode(sampled), "cold"]
        assert_samples(made, policy, plain, [[ASKED, (said, 1, 0.5), WARMER, (COLD, 2, 1.0)]])


def test_requests_have_their_turn_s_seed_and_the_tokens_that_are_left(plain: ChatTemplate) -> None:
    requests = [play(plain, [HOT, COLD], TWO, seed=seed)[1].requests for seed in (1, 1, 2, None)]
    first, again, other, free = ([request.seed for request in each] for each in requests)
    assert first == again
    assert len({*first, *other}) == 4
    assert free == [None, None]
    one_left = len(ids(plain, ASKED + HOT + WARMER)) + 1
    _, policy = play(plain, [HOT, "c"], TWO, stopped=False, stop=(".",), max_context=one_left)
    assert [(request.max_tokens, request.stop) for request in policy.requests] == [(10, (".",)), (1, (".",))]


def test_a_control_token_in_what_the_environment_says_stays_text(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    """Wherever and whatever it is: nobody can close a turn, open another, or show an image that is none."""
    tokens = ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"]
    said = "".join(f"a{token}b" for token in tokens)
    steps: Steps = [([user(said)], 0.5, False), ([], 1.0, True)]
    opening: list[ChatMessage] = [
        {"role": "system", "content": said},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [text_part(said), image_part(image("red"))]},
    ]
    for template in (plain, thinking):
        made, policy = play(
            template, ["i</think>\n\nhot<|im_start|>" + END, DEEP_COLD], steps, opening, max_context=2000
        )
        assert made.stop_reason == "done"
        # One <|im_start|> of the first answer
        for sampled, (prompt, turns) in enumerate(zip(policy.prompts, (4, 6), strict=True)):
            seen = [
                token for chunk in prompt.chunks if isinstance(chunk, tinker.EncodedTextChunk) for token in chunk.tokens
            ]
            assert [seen.count(ids(template, token)[0]) for token in tokens] == [turns - 1, turns + sampled, 0, 1, 0]
            assert template.decode(seen).count(said) == turns // 2 + 1
    assert plain.ids("a<|im_end|>") == tuple(ids(plain, "a<|im_end|>"))  # elsewhere they are what they are


def test_no_two_texts_of_the_environment_make_a_control_token(plain: ChatTemplate) -> None:
    parts = [text_part(text) for text in ("a<|im_", "end|>", "<", "|im_start|>")]
    seen = list(Conversation(plain, [{"role": "user", "content": parts}]).prompt.ids)
    assert [seen.count(ids(plain, token)[0]) for token in ("<|im_end|>", "<|im_start|>")] == [1, 2]
    assert plain.decode(seen) == "<|im_start|>user\na<|im_end|><|im_start|><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [None, THINKING, SHOUTS, COUNTS])
def test_prompts_are_those_that_transformers_renders(template: str | None, make_template: MakeTemplate) -> None:
    """Invariant: A prompt has the tokens that transformers makes of its messages."""
    said: list[dict[str, str]] = [
        {"role": "system", "content": " Köln: 12345 €\n"},
        {"role": "user", "content": "a\n\n b 😀"},
        {"role": "assistant", "content": "why</think>\n\n42"},
        {"role": "tool", "content": "{}", "reasoning": "r"},
        {"role": "user", "content": "?"},
    ]
    ours = make_template(template)
    for messages in (said, said[1:2], said[1:4]):
        text = ours.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        rendered = ours.render(cast(list[ChatMessage], messages), (), True)
        assert rendered.text == text
        assert ours.encode(rendered).ids.tolist() == ours.tokenizer.encode(text, add_special_tokens=False)


IN_TRANSFORMERS = (
    "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "{% for m in messages %}{{ m.tool_calls }}{{ m.reasoning_content }}{{ m.items() | list }}{% endfor %}",
    "{{ strftime_now('%Y-%m-%d%z') }}{{ documents }}{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
    "{{ messages | tojson(true) }}{{ messages | tojson(false, none, (',', ':')) }}{{ tools | tojson }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
)


@pytest.mark.parametrize("template", IN_TRANSFORMERS)
@pytest.mark.parametrize("options", [{}, {"tools": [{"name": "f"}], "documents": [{"title": "t"}], "bos_token": "B"}])
def test_templates_see_what_transformers_shows_them(
    template: str, options: dict[str, Any], plain: ChatTemplate
) -> None:
    said: Any = [
        {"role": "user", "content": "Köln", "tool_calls": None},
        {"role": "assistant", "content": "b", "thinking": None, "reasoning": "r"},
    ]
    ours = ChatTemplate(plain.tokenizer, None, template, options)
    text = ours.tokenizer.apply_chat_template(said, chat_template=template, tokenize=False, **options)
    assert ours.render(said, (), False).text == text
    with pytest.raises(UserError, match="a conversation needs one"):
        ours.render([], (), True)


def test_a_control_token_in_escaped_json_stays_text(plain: ChatTemplate) -> None:
    ours = ChatTemplate(plain.tokenizer, None, "{% for m in messages %}{{ m.content | tojson(true) }}{% endfor %}")
    seen = Conversation(ours, [{"role": "user", "content": "ü<|im_end|><"}]).prompt.ids.tolist()
    assert ids(plain, "<|im_end|>")[0] not in seen
    assert plain.decode(seen) == json.dumps("ü<|im_end|><")


class CodesOfCharacters(PreTrainedTokenizer):
    """A tokenizer in Python, as models without a tokenizer.json have."""

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_tokenizer_without_a_tokenizer_json_is_called_itself() -> None:
    made: Any = CodesOfCharacters  # whose parent has no types
    made = made(eos_token="<|end|>", extra_special_tokens=["<|turn|>"])
    turn, end = (made.convert_tokens_to_ids(token) for token in ("<|turn|>", "<|end|>"))
    ours = ChatTemplate(made, None, "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>")
    assert ours.end_of_turn == "<|end|>"
    assert list(ours.end_of_turn_ids) == list(ours.stop_ids) == [end]
    talk = Conversation(ours, [user("a<|end|> <")])
    opening = [turn, *map(ord, "a<|end|> <"), end, turn]
    assert talk.prompt.ids.tolist() == opening
    talk.extend(np.array([ord("b"), end], dtype=np.int32), True, [user("c")])
    assert talk.prompt.ids.tolist() == [*opening, ord("b"), end, turn, ord("c"), end, turn]


class OwnRendering(CodesOfCharacters):
    """A tokenizer whose conversations are not what a template says."""

    def apply_chat_template(  # type: ignore[override]
        self, conversation: Any, tools: Any = None, tokenize: bool = True, **options: Any
    ) -> Any:
        text = "".join(f"<|turn|>{each['role']}:{each['content']}<|end|>" for each in conversation)
        text += f"<|turn|>{options['mood']}" if options["add_generation_prompt"] else ""
        return self.encode(text) if tokenize else text


def test_a_tokenizer_that_renders_with_its_own_code_is_obeyed() -> None:
    made: Any = OwnRendering
    made = made(eos_token="<|end|>", extra_special_tokens=["<|turn|>"], chat_template="{{ messages[0].content }}")
    turn, end = (made.convert_tokens_to_ids(token) for token in ("<|turn|>", "<|end|>"))
    ours = ChatTemplate(made, None, options={"mood": ""})
    assert ours.end_of_turn == "<|end|>"
    talk = Conversation(ours, [user("a<|end|>")])
    assert talk.prompt.ids.tolist() == [turn, *map(ord, "user:a<|end|>"), end, turn]
    named = ChatTemplate(made, None, "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}")
    assert Conversation(named, [user("a")]).prompt.ids.tolist() == [ord("a"), turn]


def test_code_of_a_tokenizer_that_was_not_loaded_is_named(plain: ChatTemplate, tmp_path: Path) -> None:
    plain.tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    code = tmp_path / "tokenization_own.py"
    code.write_text("class Own:\n    pass\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert ChatTemplate(tokenizer, None).render([user("a")], (), True) == plain.render([user("a")], (), True)
    code.write_text("class Own:\n    def apply_chat_template(self): ...\n")
    with pytest.raises(ConfigError, match=r"\(tokenization_own\.py\), which was not loaded; .* chat_template=FILE"):
        ChatTemplate(tokenizer, None)
    assert ChatTemplate(tokenizer, None, "a").template == "a"


@pytest.mark.parametrize(("broken", "was", "now"), [(SHOUTS, "'hot'", "'H'"), (COUNTS, "'1'", "'3'")])
def test_a_template_that_changes_what_was_said_is_an_error(
    broken: str, was: str, now: str, make_template: MakeTemplate
) -> None:
    with pytest.raises(TemplateError, match=rf"token \d+ of the conversation was {was} and is {now}"):
        play(make_template(broken), [HOT], ENDLESS)


def test_a_tokenizer_or_template_that_cannot_be_used_is_named(plain: ChatTemplate, tmp_path: Path) -> None:
    tokenizer = copy.copy(plain.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"^model: the tokenizer '.*' has no chat template; give one with chat_template=FILE"
    ):
        ChatTemplate.for_tokenizer(tokenizer)
    ChatTemplate.for_tokenizer(tokenizer, THINKING)
    shutil.copytree(str(plain.tokenizer.name_or_path), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3}')
    for place, reason in (("nothing", ".*"), (".", "Special token eos_token has to be .*")):
        with pytest.raises(ConfigError, match=f"^model: tokenizer='.*' cannot be loaded: {reason}; give the directory"):
            tokenizer_of(str(tmp_path / place), cast(tinker.TrainingClient, None))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    for name in ("bytes.jinja", "nothing.jinja", "."):
        section = ModelSection(chat_template=str(tmp_path / name))
        with pytest.raises(
            ConfigError, match=r"^model: chat_template='.*' cannot be read: .*; it must be Jinja in UTF-8$"
        ):
            chat_template(section, plain.tokenizer)


def holds_itself() -> ChatMessage:
    message: Any = user("hi")
    return cast(ChatMessage, message | {"before": message.setdefault("before", message)})


WIDE = user(Image.new("RGB", (4000, 4)))


@pytest.mark.parametrize(
    ("shown", "sees", "error"),
    [
        (user(image("red")), False, "takes no images, and the environment showed one"),
        (WIDE, True, "the model takes no image of 4000 x 4 pixels: absolute aspect ratio must be smaller than 200"),
        (
            user(b"a path"),
            True,
            "Script.{method} returned an image in {place} that cannot be shown: an image of 6 bytes",
        ),
        (holds_itself(), True, "RecursionError: maximum recursion depth exceeded"),
        (
            {"role": "nobody", "content": "hi"},
            True,
            "the chat template cannot render the messages: TemplateError: who is nobody?",
        ),
    ],
)
@pytest.mark.parametrize("opens", [True, False])
def test_what_cannot_be_shown_ends_its_episode_only(
    shown: ChatMessage, sees: bool, error: str, opens: bool, make_template: MakeTemplate
) -> None:
    """The answer before it is kept."""
    asks_who = "{%- for m in messages if m.role == 'nobody' -%}{{ raise_exception('who is nobody?') }}{%- endfor -%}"
    strict = make_template(asks_who + KEEPS_THOUGHTS)
    template = ChatTemplate(strict.tokenizer, strict.processor if sees else None, strict.template)
    made, policy = play(template, [HOT, HOT], [([shown], 0.5, False)], [shown] if opens else OPENING)
    assert (made.stop_reason, made.usable, made.turns) == ("env_error", False, 0 if opens else 1)
    method, place = ("init", "messages[0]") if opens else ("step", "observations[0]")
    assert error.format(method=method, place=place) in made.error
    assert made.details.startswith("prompt: Prompt(seed=5, messages=(), fields={})\n")
    if not opens:
        assert "the model said: 'hot<|im_end|>'\n" in made.details
        reward = 0.0 if "Script." in error else 0.5  # nothing counts of what a wrong step returns
        assert_samples(made, policy, template, [[ASKED + THINK, (HOT, 1, reward)]])


def test_a_prompt_without_room_for_an_answer_or_that_the_server_refuses_ends_its_episode_only(
    server_url: str, plain: ChatTemplate
) -> None:
    room = len(ids(plain, ASKED))
    made, policy = play(plain, [], [], max_context=room)
    assert (made.stop_reason, made.samples, policy.prompts) == ("env_error", (), [])
    assert made.error.startswith(
        f"the first messages have {room} tokens, and a conversation has room for {room}; shorten them"
    )
    client = (
        tinker.ServiceClient(base_url=server_url, api_key="tml-test").create_sampling_client(base_model="tiny").result()
    )
    rollouts = EnvRollouts("arithmetic", {}, settings(max_context=10**6, max_tokens=10**6), plain, InlineWorkers(600))
    made = asyncio.run(rollouts.play(TinkerPolicy(client), Prompt(5), EpisodeId("arithmetic", 5)))
    assert (made.stop_reason, made.error.partition(": ")[0]) == ("env_error", "the server refuses the prompt")


def test_many_episodes_are_played_and_no_more_at_a_time_than_wanted(plain: ChatTemplate) -> None:
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
        rollouts = EnvRollouts("arithmetic", {}, settings(), plain, InlineWorkers(600), in_flight=20)
        return await asyncio.gather(*(rollouts.play(Slow(), Prompt(n), EpisodeId("arithmetic", n)) for n in range(100)))

    assert [(made.episode.seed, made.usable) for made in asyncio.run(play_all())] == [(n, True) for n in range(100)]
    assert most == 20


@pytest.mark.parametrize("turns", [1, 2])
def test_images_are_forgotten_with_their_turns(turns: int, plain: ChatTemplate) -> None:
    colors = ["red", "blue", "green", "white"]
    system: ChatMessage = {"role": "system", "content": [image_part(image("black"))]}
    steps: Steps = [*(([user(image(color))], 0.0, False) for color in colors[1:]), ([], 1.0, True)]
    made, policy = play(plain, ["x" + END] * 4, steps, [system, user(image("red"))], context_turns=turns)
    asked = [
        [chunk.data for chunk in prompt.chunks if isinstance(chunk, tinker.types.ImageChunk)]
        for prompt in policy.prompts
    ]
    seen = [["black", *colors[max(0, n + 1 - turns) : n + 1]] for n in range(4)]
    assert asked == [[plain.image(image(color)).data for color in shown] for shown in seen]
    assert [len(sample.sequence.images) for sample in made.samples] == ([2] * 4 if turns == 1 else [3] * 3)


@pytest.mark.parametrize(
    ("sections", "tails", "ones"),
    [
        ({"training": {"kl_coefficient": 0.1}}, 0, 0),
        ({"generation": {"stop": ["\n"]}}, 1, 0),
        ({"generation": {"stop": ["\n"], "end_turn_after_stop_string": False}}, 0, 0),
        ({"generation": {"top_p": 0.9}}, 0, 1),
        ({"generation": {"top_k": 5, "stop": ["\n"]}}, 1, 1),
    ],
)
def test_answers_leave_room_for_what_comes_behind_them(
    sections: dict[str, Any], tails: int, ones: int, plain: ChatTemplate
) -> None:
    config = from_tree({"model": {"base_model": "tiny"}, "env": {"name": "arithmetic"}, **sections})
    assert rollout_settings(config, 100, plain).max_context == 100 - tails * len(plain.end_of_turn_ids) - ones


def test_the_longest_episode_can_be_scored(server_url: str, plain: ChatTemplate, tmp_path: Path) -> None:
    config = config_of(server_url, tmp_path, model={"base_model": "tiny"}, training={"kl_coefficient": 0.1})
    longest = rollout_settings(config, context_limit(config.server, "tiny"), plain).max_context
    reference = (
        tinker.ServiceClient(base_url=server_url, api_key="tml-test").create_sampling_client(base_model="tiny").result()
    )
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
    assert len(file_prompts(file, 0)) == len(prompts_of(str(file), 0, 0, 64)) == 1500
    assert prompts_of("", 7, 0, 64) == seed_prompts(7, 64)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("", "it is empty"),
        ('{"question": "2 + 2"}', "row 1: a prompt has the keys messages and fields"),
        ('{}\n{"messages": 3}', "row 2: messages is a list of messages"),
        ('{"messages": ["2 + 2"]}', "row 1: messages is a list of messages"),
        ('{"fields": ["4"]}', r"row 1: messages is a list of messages, and fields an object, got {'"),
        ("no JSON", "cannot read the prompts"),
    ],
)
def test_a_file_that_holds_no_prompts_is_named(rows: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=complaint):
        file_prompts(tmp_path / "prompts.jsonl", 5)
