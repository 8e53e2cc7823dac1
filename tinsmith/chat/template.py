"""Reads a model's tokenizer and chat template from its files, for conversations of applications."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tinsmith.chat.format import FAULTS, MessageFormat, own_rendering, tokenizing
from tinsmith.chat.tools import CallForm, form_of
from tinsmith.errors import UserError, translated

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that templates may name."""
RESERVED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", *_SPECIAL)
"""Names in templates that a request's options may not replace."""


class ChatFormat(MessageFormat):
    """The tokenizer and the chat template of one model. For any thread."""

    def __init__(self, source: str) -> None:
        """Read the files of a directory, or of a Hub id. Raises UserError if there is no tokenizer.json."""
        self.source = source
        path = _file(source, "tokenizer.json")
        if path is None:
            raise UserError(f"model: {source} has no tokenizer.json, so it can be sampled through the SDK alone")
        with translated(
            Exception, UserError, lambda error: f"model: {path} cannot be used: {error}; download it again"
        ):
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        settings = _read_json(source, "tokenizer_config.json")
        names = {name: text for name in _SPECIAL if (text := _content(settings.get(name)))}
        templates = _templates(source, settings)
        config = _read_json(source, "config.json")
        self._unread = own_rendering(settings.get("auto_map"), partial(_read_text, source))
        """The model's code that renders conversations in place of its template, and that no server runs."""
        image_id = config.get("image_token_id")
        image_token = "" if image_id is None else self.tokenizer.id_to_token(image_id) or ""
        added = self.tokenizer.get_added_tokens_decoder()
        super().__init__(tokenizing(self.tokenizer), added, templates, names, image_token=image_token)
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))
        """Bytes, or characters: no text has more for each of its tokens."""
        self.calls: CallForm | None = next(filter(None, map(form_of, templates.values())), None)
        """The form of its calls of tools; None if its template has no tools, or others than are known here."""
        self.end_of_turn = ""
        """The token that the template puts behind an answer, as text; empty if there is none."""
        if templates:
            with suppress(*FAULTS):  # a template that is made for another conversation
                _, self.end_of_turn = self.framing()
        self.silent_ids = frozenset([*self.special_ids, *self.stop_ids, *self._id_of(names.get("eos_token", ""))])
        """Tokens that are no text: special ones, and those that end an answer."""

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer, beside the model's end of sequence."""
        return self._id_of(self.end_of_turn)

    def _id_of(self, text: str) -> list[int]:
        found = self.tokenizer.token_to_id(text) if text else None
        return [] if found is None else [found]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        begun: str = "",
    ) -> str:
        """Return a conversation as a text, with `BREAK` in what would be a control token.

        `begun` is the beginning of the answer.
        Raises UserError for messages that the template refuses, or is not made for.
        """
        if self._unread is not None:
            raise UserError(
                f"model: {self.source} renders conversations with code of its own ({self._unread}), which is not run "
                "here; send completions the tokens of its apply_chat_template, or, if its template alone says the "
                "same, remove auto_map from its tokenizer_config.json"
            )
        if not self._templates:
            raise UserError(f"model: {self.source} has no chat template; use completions, or a model that can chat")
        with translated(FAULTS, UserError, lambda error: f"messages: the chat template cannot render them: {error}"):
            text = self.rendered(self.broken(messages), self.broken(tools), self.broken(options or {}))
        return text + str(self.broken(begun))

    def pieces(self, text: str, images: int) -> list[list[int]]:
        """Return the tokens of a rendered text before, between and behind its images.

        Raises UserError if the template shows another number of images.
        """
        parts = self.segments(text)
        if len(parts) != images + 1:
            raise UserError(f"messages: the chat template shows {len(parts) - 1} of the conversation's {images} images")
        return list(map(self.ids, parts))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is no conversation, with what the tokenizer puts before and behind one."""
        return self.tokenizer.encode_batch([text])[0].ids

    def written(self, token: int) -> str:
        """Return the text of one token; part of a character becomes a replacement character."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


def _file(source: str, name: str) -> Path | None:
    """The place of a model's file, if there is one."""
    if Path(source).is_absolute():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # 10 MB that most servers do without
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(source, name)
    if isinstance(cached, str):
        return Path(cached)
    with suppress(EntryNotFoundError, LocalEntryNotFoundError):
        return Path(hf_hub_download(source, name))
    return None


def _read_text(source: str, name: str) -> str | None:
    path = _file(source, name)
    return None if path is None else path.read_text(encoding="utf-8")


def _read_json(source: str, name: str) -> dict[str, Any]:
    text = _read_text(source, name)
    return {} if text is None else dict(json.loads(text))


def _content(token: Any) -> str:
    """The characters of a special token, which is a text or described by an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _templates(source: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; most models have one, `default`."""
    text = _read_text(source, "chat_template.jinja")
    if text is not None:
        return {"default": text}
    found = settings.get("chat_template") or _read_json(source, "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return {"default": found} if found else {}
