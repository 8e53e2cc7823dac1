"""A model's tokenizer and chat template, read from its files: conversations become tokens and images.

Only the template writes control tokens, such as the end of a turn. Where a message contains the characters of one, the
character `BREAK` stands behind the first of them until the text is tokenized, as text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tinsmith.chat.tools import CallForm, form_of
from tinsmith.errors import UserError, translated

BREAK = "\U000fdeae"
"""Breaks up what would be a control token. A private-use character, which no template and no model writes."""
_SAID = "\U000fdead"
"""Stands for an answer, to see what the template puts behind it."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that templates may name."""
RESERVED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", *_SPECIAL)
"""Names in templates that a request's options may not replace."""


class ChatFormat:
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
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        settings = _read_json(source, "tokenizer_config.json")
        self._names = {name: text for name in _SPECIAL if (text := _content(settings.get(name)))}
        special = {
            at: token.content for at, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._control = sorted({*special.values(), *self._names.values()}, key=len, reverse=True)
        self._any_control, self._longest_control = _any_of(self._control), max(map(len, self._control), default=0)
        begun = sorted({token[:end] for token in self._control for end in range(1, len(token))}, key=len, reverse=True)
        self._any_begun = re.compile(f"(?:{_any_of(begun).pattern})\\Z")
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))
        """Bytes, or characters: no text has more for each of its tokens."""
        templates = _templates(source, settings)
        self._templates = _compiled(templates)
        self.calls: CallForm | None = next(filter(None, map(form_of, templates.values())), None)
        """The form of its calls of tools; None if its template has no tools, or others than are known here."""
        image_id = _read_json(source, "config.json").get("image_token_id")
        self.image_token = "" if image_id is None else self.tokenizer.id_to_token(image_id) or ""
        """Stands for an image in a rendered text; empty for a model of text alone."""
        self.end_of_turn = self._end_of_turn() if self._templates else ""
        """The control token that the template puts behind an answer, as text; empty if there is none."""
        self.silent_ids = frozenset([*special, *self.stop_ids, *self._id_of(self._names.get("eos_token", ""))])
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
        add_generation_prompt: bool = True,
        begun: str = "",
    ) -> str:
        """Return a conversation as a text, with `BREAK` in what would be a control token.

        The content of a message is a text, or a list of parts: {"type": "text", "text": ...} and {"type": "image"}.
        `begun` is the beginning of the answer.
        Raises UserError for messages that the template refuses, or is not made for.
        """
        if not self._templates:
            raise UserError(f"model: {self.source} has no chat template; use completions, or a model that can chat")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        faults = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
        with translated(faults, UserError, lambda error: f"messages: the chat template cannot render them: {error}"):
            text = template.render(
                **self._broken(options or {}),
                **self._names,
                messages=self._broken(messages),
                tools=self._broken(tools) or None,
                add_generation_prompt=add_generation_prompt,
                raise_exception=_refuse,
                strftime_now=lambda form: datetime.now().astimezone().strftime(form),
            )
        return text + str(self._broken(begun))

    def pieces(self, text: str, images: int) -> list[list[int]]:
        """Return the tokens of a rendered text before, between and behind its images.

        Raises UserError if the template shows another number of images.
        """
        parts = text.split(self.image_token) if self.image_token else [text]
        if len(parts) != images + 1:
            raise UserError(f"messages: the chat template shows {len(parts) - 1} of the conversation's {images} images")
        return [self._ids(part) for part in parts]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is no conversation, with what the tokenizer puts before and behind one."""
        return self.tokenizer.encode_batch([text])[0].ids

    def written(self, token: int) -> str:
        """Return the text of one token; part of a character becomes a replacement character."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        # A batch is tokenized without the interpreter's lock
        encoded = self.tokenizer.encode_batch(text.split(BREAK), add_special_tokens=False)
        return list(chain.from_iterable(each.ids for each in encoded))

    def _broken(self, said: Any) -> Any:
        if isinstance(said, str):
            text = self._any_control.sub(lambda token: token[0][0] + BREAK + token[0][1:], said.replace(BREAK, ""))
            # Another text, which the template puts behind this one, may go on with it
            begun = self._any_begun.search(text, max(0, len(text) - self._longest_control))
            return text if begun is None else text[: begun.start() + 1] + BREAK + text[begun.start() + 1 :]
        if isinstance(said, Mapping):
            return {self._broken(key): self._broken(value) for key, value in said.items()}
        return [self._broken(part) for part in said] if isinstance(said, list | tuple) else said

    def _end_of_turn(self) -> str:
        asked = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _SAID}]
        with suppress(UserError):  # a template that is made for another conversation
            tail = self.render(asked, add_generation_prompt=False).partition(_SAID)[2]
            return max((token for token in self._control if tail.startswith(token)), key=len, default="")
        return ""


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


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


def _read_json(source: str, name: str) -> dict[str, Any]:
    path = _file(source, name)
    return {} if path is None else dict(json.loads(path.read_text(encoding="utf-8")))


def _content(token: Any) -> str:
    """The characters of a special token, which is a text or described by an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _templates(source: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; most models have one, `default`."""
    path = _file(source, "chat_template.jinja")
    if path is not None:
        return {"default": path.read_text(encoding="utf-8")}
    found = settings.get("chat_template") or _read_json(source, "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return {"default": found} if found else {}


class _Generation(Extension):
    """The block that marks what a model has said, for training; its content is all that counts here."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(templates: Mapping[str, str]) -> dict[str, Template]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return {name: environment.from_string(text) for name, text in templates.items()}


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> None:
    raise TemplateError(message)
