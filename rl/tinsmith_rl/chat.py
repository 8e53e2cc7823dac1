"""A model's chat template for episodes, and a conversation that grows turn by turn.

What the model sampled is kept as it is and never tokenized again. The environment's messages are rendered once. After
every turn the whole conversation is rendered as a text, only to compare: if that text begins with what the model has
seen, the rest of it is appended to the tokens that are there. If it does not, because templates of reasoning models
drop earlier reasoning, the next prompt is tokenized afresh from the new text. A template that changes anything else is
refused.

A rendered text contains the model's placeholder token where an image stands. The same characters may also occur as
plain text, for example because the model sampled them. To tell the two apart, plain text carries the character
`ESCAPED` instead until it is tokenized.

`format.py` renders, for applications of the server too. The tokenizer is the one that the SDK gives, or a copy of it:
tokens are those of any other script.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
from huggingface_hub import try_to_load_from_cache
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tinsmith_rl.env import ChatMessage, visible
from tinsmith_rl.errors import ConfigError, UserError, foreign_code, translated
from tinsmith_rl.format import ESCAPED, MessageFormat, Tokenize, own_rendering, tokenizing
from tinsmith_rl.sequences import (
    EncodedImage,
    ImageProcessor,
    TokenSequence,
    concatenate,
    image_sequence,
    takes_images,
    text_sequence,
)

_RENDERING = ("apply_chat_template", "get_chat_template")
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MOST_OF_A_CHARACTER = 8
"""Tokens that are joined at most until their bytes are a character."""


class TemplateError(UserError):
    """The chat template changes earlier messages, so no sequence of tokens would be what the model saw."""


@dataclass(frozen=True)
class RenderedText:
    """A conversation as a text, and the images that its placeholders stand for, in order."""

    text: str
    images: tuple[EncodedImage, ...]


class ChatTemplate:
    """Renders conversations for one model.

    `template` replaces the tokenizer's own Jinja template; `options` are passed to it, such as {"enable_thinking":
    False}. `processor` is needed for images only. Raises ConfigError if there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: ImageProcessor | None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.template = template
        self.options = dict(options or {})
        self.placeholder = "" if processor is None else str(tokenizer.convert_ids_to_tokens(processor.placeholder_id))
        self._format = self._read_format()
        # Environments repeat the same short texts, so most of them are in these caches.
        self._tokenize = lru_cache(maxsize=4096)(lambda text: tuple(self._format.ids(text)))
        self._text = lru_cache(maxsize=4096)(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        )
        self._piece = lru_cache(maxsize=None)(lambda token: self._behind_a_letter((token,)))  # one for each token
        with foreign_code(_cannot_render):
            self.prefill, self.end_of_turn = self._format.framing(self.options)
        """How the prompt begins an answer, such as "<think>\n" (mostly ""), and the end-of-turn token as text.

        The template puts this token behind an answer; the text is empty if the token is not special.
        """
        self.end_of_turn_ids: tuple[int, ...] = self.ids(self.end_of_turn)
        ends = {*self.end_of_turn_ids[:1], tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.stop_ids = frozenset(int(end) for end in ends if isinstance(end, int))
        """Tokens at which the model's answer ends."""

    @classmethod
    def for_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> "ChatTemplate":
        """A template whose image processor, if the model takes images, is read from the tokenizer's directory."""
        source = str(tokenizer.name_or_path)
        return cls(tokenizer, ImageProcessor(source) if takes_images(source) else None, template, options)

    def image(self, source: Any) -> EncodedImage:
        """The encoded image of a message. Raises UserError if this model takes no images, or if `source` is none."""
        if self.processor is None:
            raise UserError(
                f"the model of tokenizer {self.tokenizer.name_or_path!r} takes no images, "
                "and the environment showed one"
            )
        return self.processor.image(source)

    def render(
        self, messages: Sequence[ChatMessage], images: tuple[EncodedImage, ...], add_generation_prompt: bool
    ) -> RenderedText:
        """The conversation as a text. `images` are those of all messages, in order.

        Raises UserError if there are none, or the template leaves images out, or cannot render the messages.
        """
        if not messages:
            raise UserError("the environment gave no message; a conversation needs one")
        shaped = [self._for_template(message) for message in messages]
        with foreign_code(_cannot_render):
            text = self._format.rendered(shaped, (), self.options, add_generation_prompt)
        shown = len(self._format.segments(text)) - 1
        if shown != len(images):
            raise UserError(f"the chat template shows {shown} of the conversation's {len(images)} images")
        return RenderedText(text, images)

    def encode(self, rendered: RenderedText) -> TokenSequence:
        """Tokens and images of a rendered text."""
        if not rendered.images:
            return text_sequence(self.ids(self.unescaped(rendered.text)))
        assert self.processor is not None
        segments = self._format.segments(rendered.text)
        parts = [text_sequence(self.ids(self.unescaped(segments[0])))]
        for image, segment in zip(rendered.images, segments[1:], strict=True):
            parts += [
                image_sequence(image, self.processor.placeholder_id),
                text_sequence(self.ids(self.unescaped(segment))),
            ]
        return concatenate(parts)

    def ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a text. Special tokens are recognised unless they are broken up, and none are added."""
        return self._tokenize(text)

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special tokens included."""
        return self._text(tuple(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Where several tokens make one character, the last of them has it."""
        pieces, begun = list(map(self._piece, ids)), list[int]()
        if _NO_CHARACTER not in "".join(pieces):
            return pieces
        pieces = []
        for token in ids:
            begun.append(token)
            text = self._piece(token) if len(begun) == 1 else self._behind_a_letter(tuple(begun))
            if _NO_CHARACTER not in text or len(begun) == _MOST_OF_A_CHARACTER:
                pieces += [""] * (len(begun) - 1) + [text]
                begun.clear()
        return pieces + [""] * (len(begun) - 1) + [self._behind_a_letter(tuple(begun))] if begun else pieces

    def _behind_a_letter(self, ids: tuple[int, ...]) -> str:
        """The text of tokens that are not the first of a text, at which some tokenizers drop a space."""
        return self.decode([*self._tokenize("a"), *ids]).removeprefix("a")

    def escaped(self, text: str) -> str:
        """A text of the model, with `ESCAPED` in place of each placeholder."""
        return text.replace(self.placeholder, ESCAPED) if self.placeholder else text

    def broken(self, text: str) -> str:
        """A text of the environment with all its control tokens broken up."""
        return str(self._format.broken(text))

    def heard(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Messages of the environment with all their control tokens broken up; images are as they were."""
        return [
            cast(
                ChatMessage,
                self._format.broken({**message, "content": ""}) | {"content": self._broken_content(message["content"])},
            )
            for message in messages
        ]

    def _broken_content(self, content: str | list[dict[str, Any]]) -> Any:
        if isinstance(content, str):
            return self.broken(content)
        return [self._format.broken(part) if part["type"] == "text" else part for part in content]

    def unescaped(self, text: str) -> str:
        """The inverse of `escaped`."""
        return text.replace(ESCAPED, self.placeholder) if self.placeholder else text

    def _for_template(self, message: ChatMessage) -> dict[str, Any]:
        """The message in the form that templates expect: each image a part {"type": "image"}."""
        content = message["content"]
        if isinstance(content, str):
            return {**message}
        return {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in content]}

    def _read_format(self) -> MessageFormat:
        found = self.template or self.tokenizer.chat_template
        templates = found if isinstance(found, dict) else {"default": found} if found else {}
        name = f"model: the tokenizer {str(self.tokenizer.name_or_path)!r}"
        remedy = "give one with chat_template=FILE, or take a model that was trained to chat"
        own = None if self.template else self._own_rendering(name)
        if "default" not in templates and own is None:
            raise ConfigError(f"{name} has no chat template; {remedy}")
        with translated(
            TemplateSyntaxError, lambda error: ConfigError(f"{name} has a chat template that is no Jinja: {error}")
        ):
            return MessageFormat(
                _tokenize(self.tokenizer),
                self.tokenizer.added_tokens_decoder,
                templates,
                self.tokenizer.special_tokens_map,
                map(str, self.tokenizer.all_special_tokens),
                self.placeholder,
                own,
            )

    def _own_rendering(self, name: str) -> Callable[..., Any] | None:
        """The `apply_chat_template` of a tokenizer that replaces it. Raises ConfigError if its code was not loaded."""
        kind, source = type(self.tokenizer), str(self.tokenizer.name_or_path)
        if any(getattr(kind, each) is not getattr(PreTrainedTokenizerBase, each) for each in _RENDERING):
            return self.tokenizer.apply_chat_template
        if kind.__module__.startswith("transformers_modules."):
            return None  # code of the model's own, which replaces something else
        code = own_rendering(self.tokenizer.init_kwargs.get("auto_map"), lambda file: _read_text(source, file))
        if code is not None:
            raise ConfigError(
                f"{name} renders conversations with code of its own ({code}), which was not loaded; leave tokenizer "
                "empty if the SDK loads it, or name the template to use with chat_template=FILE"
            )
        return None


def _read_text(source: str, file: str) -> str | None:
    """The text of a tokenizer's file, if it is on this machine."""
    found = Path(source) / file if Path(source).is_dir() else try_to_load_from_cache(source, file)
    return Path(found).read_text(encoding="utf-8") if found and Path(found).is_file() else None


def _tokenize(tokenizer: PreTrainedTokenizerBase) -> Tokenize:
    """A tokenizer in Python, of models without a tokenizer.json, is called itself; any other is copied."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return tokenizing(Tokenizer.from_str(backend.to_str()))  # transformers sets lengths in its own at every call
    return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _cannot_render(error: BaseException) -> UserError:
    return UserError(f"the chat template cannot render the messages: {type(error).__name__}: {error}")


class Conversation:
    """A conversation in which it is the model's turn to speak.

    `end_turn_after_stop_string`: put the template's end-of-turn token, which nobody sampled, behind an answer that
    ended on a stop string. `context_turns`: the model sees this many turns, including the one that it is about to
    answer; 0 is all. A turn is what the environment says and the answer to it. System messages at the start belong to
    no turn and stay. From the first dropped turn on, every prompt is tokenized afresh.
    """

    prompt: TokenSequence
    """Prompt of the model's next answer."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        end_turn_after_stop_string: bool = True,
        context_turns: int = 0,
    ) -> None:
        self.template = template
        self.end_turn_after_stop_string = end_turn_after_stop_string
        self.context_turns = context_turns
        self.messages: list[ChatMessage] = template.heard(messages)
        self.images: tuple[EncodedImage, ...] = tuple(map(template.image, image_sources(messages)))
        rendered = template.render(self.messages, self.images, add_generation_prompt=True)
        self._opening = tuple(self.messages)  # the messages before the first answer that the model still sees
        self._shown = rendered.text  # the text of `prompt`
        self._answers: list[str] = []
        self._turn_starts = [len(list(takewhile(_is_system, messages)))]  # indices into `messages`
        self.prompt = template.encode(rendered)

    def text_of(self, sampled: NDArray[np.int32]) -> str:
        """The text of an answer, without the token that ended the turn: what the environment reads."""
        return self.template.decode((sampled[:-1] if self._ends_turn(sampled) else sampled).tolist())

    def tail_of(self, sampled: NDArray[np.int32], stopped: bool) -> tuple[int, ...]:
        """The end-of-turn tokens to put behind an answer that ended on a stop string; empty for any other answer."""
        needed = stopped and self.end_turn_after_stop_string and len(sampled) > 0 and not self._ends_turn(sampled)
        return self.template.end_of_turn_ids if needed else ()

    def extend(self, sampled: NDArray[np.int32], stopped: bool, observations: Sequence[ChatMessage]) -> None:
        """Append the model's answer and the environment's reply; `prompt` is then the next turn's.

        `stopped`: the answer did not end because it reached its maximum length. Raises TemplateError.
        """
        text = self.template.escaped(self.text_of(sampled))
        seen = self._shown + text
        new_images = tuple(map(self.template.image, image_sources(observations)))
        self.images += new_images
        self._answers.append(text)
        replies: list[ChatMessage] = self.template.heard(observations)
        # Some templates expect the prefill in the message and some add it, so try without and with it.
        for content in dict.fromkeys((text, self.template.prefill + text)):
            answer: ChatMessage = {"role": "assistant", "content": content}
            history = [*self.messages, answer, *replies]
            rendered = self.template.render(history, self.images, add_generation_prompt=True)
            appended = self._appended(rendered.text, seen, sampled, stopped)
            if appended is not None:
                break
        self.messages, self._shown = history, rendered.text
        if appended is None:
            self._check_only_reasoning_dropped(rendered, sampled)
            self.prompt = self.template.encode(rendered)
        else:
            self.prompt = concatenate(
                (self.prompt, text_sequence(sampled), self.template.encode(RenderedText(appended, new_images)))
            )
        self._turn_starts.append(len(history) - len(observations))
        if self.context_turns and len(self._turn_starts) > self.context_turns:
            self._drop_oldest_turn()

    def _drop_oldest_turn(self) -> None:
        first, second = self._turn_starts[:2]
        before, dropped = (len(image_sources(part)) for part in (self.messages[:first], self.messages[first:second]))
        self.images = self.images[:before] + self.images[before + dropped :]
        self.messages = self.messages[:first] + self.messages[second:]
        self._turn_starts = [first, *(start - second + first for start in self._turn_starts[2:])]
        self._answers = self._answers[1:]
        self._opening = tuple(self.messages[: self._turn_starts[1] - 1] if self._answers else self.messages)
        rendered = self.template.render(self.messages, self.images, add_generation_prompt=True)
        self._shown, self.prompt = rendered.text, self.template.encode(rendered)

    def _ends_turn(self, sampled: NDArray[np.int32]) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.template.stop_ids

    def _appended(self, text: str, seen: str, sampled: NDArray[np.int32], stopped: bool) -> str | None:
        """The text that the template adds behind what was seen and sampled; None if `text` does not begin with that."""
        if not text.startswith(seen):
            return None
        rest, end = text[len(seen) :], self.template.end_of_turn
        if tuple(sampled[-1:]) == self.template.end_of_turn_ids[:1]:
            return rest.removeprefix(end) if rest.startswith(end) else None
        if stopped and not self._ends_turn(sampled) and not self.end_turn_after_stop_string:
            return rest.removeprefix(end)
        return rest

    def _check_only_reasoning_dropped(self, rendered: RenderedText, sampled: NDArray[np.int32]) -> None:
        """Raise TemplateError unless the new text has the opening and, in order, every answer without its reasoning."""
        images = self.images[: len(image_sources(self._opening))]
        opening = self.template.render(self._opening, images, add_generation_prompt=False).text
        kept = rendered.text.startswith(opening)
        at = len(opening)
        for answer in map(visible, self._answers):
            found = rendered.text.find(answer, at)
            kept &= found >= 0
            at = found + len(answer)
        if not kept:
            raise self._changed(self.prompt + text_sequence(sampled), self.template.encode(rendered))

    def _changed(self, seen: TokenSequence, again: TokenSequence) -> TemplateError:
        """The error, with the first token that differs."""
        common = min(len(seen), len(again))
        differs = np.flatnonzero(seen.ids[:common] != again.ids[:common])
        at = int(differs[0]) if len(differs) else common
        was, now = (repr(self.template.decode(sequence.ids[at : at + 1].tolist())) for sequence in (seen, again))
        return TemplateError(
            "the chat template changes what was said, beyond leaving out reasoning: "
            f"token {at} of the conversation was {was} and is {now} "
            "when it is rendered again; give a template that keeps the messages and the visible answers"
        )


def image_sources(messages: Sequence[ChatMessage]) -> list[Any]:
    """The images of messages in the form in which the environment gave them, in order.

    Raises UserError for a part of unknown type.
    """
    found = []
    for message in messages:
        for part in message["content"] if not isinstance(message["content"], str) else ():
            if part["type"] == "image":
                found.append(part["image"])
            elif part["type"] == "image_url":
                found.append(part["image_url"]["url"])
            elif part["type"] != "text":
                raise UserError(f"a message's part has type {part['type']!r}; known are text, image and image_url")
    return found


def _is_system(message: ChatMessage) -> bool:
    return message["role"] == "system"
