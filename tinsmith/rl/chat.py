"""A model's chat template: messages -> text -> `TokenStream`.

While a conversation is a text, a real picture is the template's placeholder; a placeholder that somebody merely wrote (the model may sample
one, too) is kept apart as `WRITTEN`, so that it can never be taken for a picture, and becomes the token of that name again when the text is
tokenized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinsmith.errors import UserError
from tinsmith.rl.env import Message
from tinsmith.rl.pictures import Picture, PictureProcessor, takes_pictures
from tinsmith.rl.stream import PlacedPicture, TokenStream, join, text_stream

WRITTEN = "\U000fdead"
"""Stands for a placeholder that is text. A character of a private area, which no template and no model writes."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a text, with the pictures that its placeholders stand for, in order."""

    text: str
    pictures: tuple[Picture, ...]


class ChatTemplate:
    """Renders conversations for one model.

    `template` replaces the tokenizer's own Jinja template; `options` are handed to it, such as {"enable_thinking": False}. Pictures need
    `processor`, which `for_tokenizer` finds.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: PictureProcessor | None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        # Environments say the same short things over and over: most texts are known already.
        self._tokenize = lru_cache(maxsize=4096)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._text = lru_cache(maxsize=4096)(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        )
        self.template = template
        self.options = dict(options or {})
        self.placeholder = "" if processor is None else str(tokenizer.convert_ids_to_tokens(processor.placeholder_id))
        probe = self._probe()
        self.prefill = probe.prefill
        """What the generation prompt says on the model's behalf, such as "<think>\\n"; mostly empty."""
        self.end_of_turn = probe.end_of_turn
        """Text of the token that the template puts behind an answer; empty if that is no special token."""
        self.end_of_turn_ids: tuple[int, ...] = self.ids(self.end_of_turn)
        ends = {*self.end_of_turn_ids[:1], tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.stop_ids = frozenset(int(end) for end in ends if isinstance(end, int))
        """Tokens that end a generation by themselves."""

    @classmethod
    def for_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> "ChatTemplate":
        """With the picture processor that lies beside the tokenizer's files, if there is one."""
        source = str(tokenizer.name_or_path)
        return cls(tokenizer, PictureProcessor(source) if takes_pictures(source) else None, template, options)

    def picture(self, source: Any) -> Picture:
        """A picture of a message. Raises UserError if this model takes none, or if it is none."""
        if self.processor is None:
            raise UserError(f"the model of tokenizer {self.tokenizer.name_or_path!r} takes no images, and the environment showed one")
        return self.processor.picture(source)

    def render(self, messages: Sequence[Message], pictures: tuple[Picture, ...], add_generation_prompt: bool) -> Rendered:
        """The conversation as a text. `pictures` are those of all messages, in order.

        Raises UserError if the template leaves pictures out, or cannot render the messages.
        """
        text = self._apply([self._plain(message) for message in messages], add_generation_prompt)
        shown = text.count(self.placeholder) if self.placeholder else 0
        if shown != len(pictures):
            raise UserError(f"the chat template shows {shown} of the conversation's {len(pictures)} images")
        return Rendered(text, pictures)

    def encode(self, rendered: Rendered) -> TokenStream:
        """Tokens and pictures of a rendered text."""
        if not rendered.pictures:
            return text_stream(self.ids(self.unprotected(rendered.text)))
        segments = rendered.text.split(self.placeholder)
        parts = [text_stream(self.ids(self.unprotected(segments[0])))]
        for picture, segment in zip(rendered.pictures, segments[1:], strict=True):
            parts += [self._picture_stream(picture), text_stream(self.ids(self.unprotected(segment)))]
        return join(parts)

    def decode(self, ids: list[int]) -> str:
        """Text of sampled tokens, special ones included."""
        return self._text(tuple(ids))

    def protected(self, text: str) -> str:
        """The text with every written placeholder as `WRITTEN`."""
        return text.replace(self.placeholder, WRITTEN) if self.placeholder else text

    def unprotected(self, text: str) -> str:
        """The inverse of `protected`."""
        return text.replace(WRITTEN, self.placeholder) if self.placeholder else text

    def _picture_stream(self, picture: Picture) -> TokenStream:
        assert self.processor is not None
        return TokenStream(np.full(picture.tokens, self.processor.placeholder_id, dtype=np.int32), (PlacedPicture(0, picture),))

    def ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, special ones recognised, nothing added."""
        return self._tokenize(text)

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it: texts protected, pictures as bare parts of type "image"."""
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self.protected(content)}
        parts = [
            {"type": "text", "text": self.protected(part["text"])} if part["type"] == "text" else {"type": "image"} for part in content
        ]
        return {**message, "content": parts}

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=add_generation_prompt, **self.options
        )
        return str(rendered)

    def _probe(self) -> "_Framing":
        """How the template frames an answer, seen from one that it renders."""
        question: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
        answered = self._apply([*question, {"role": "assistant", "content": WRITTEN}], False)
        head, _, tail = answered.partition(WRITTEN)
        prompt = self._apply(question, True)
        prefill = prompt[len(head) :] if prompt.startswith(head) else ""
        special = [str(token) for token in {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}]
        return _Framing(prefill, max((token for token in special if tail.startswith(token)), key=len, default=""))


@dataclass(frozen=True)
class _Framing:
    prefill: str
    end_of_turn: str


def sources_of(messages: Sequence[Message]) -> list[Any]:
    """The pictures of messages as the environment gave them, in order. Raises UserError for a part that is neither text nor picture."""
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
