"""Turns messages into a text, and the text into tokens, by a model's tokenizer and chat template.

Two packages have this one file, so it imports nothing of either: the server as `tinsmith.chat.format`, and the RL
client, by a link, as `tinsmith_rl.format`. Neither package depends on the other, which brings torch or an SDK.

Only the template writes control tokens, such as the end of a turn. Where a message contains the characters of one, the
character `BREAK` stands behind the first of them until the text is tokenized, as text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain, takewhile
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

BREAK = "\U000fdeae"
"""Breaks up what would be a control token. A private-use character, which no template and no model writes."""
ESCAPED = "\U000fdead"
"""Stands for an answer of the model, or for a placeholder in one. Also a private-use character."""
FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a template that refuses messages, or is not made for them."""
Tokenize = Callable[[list[str]], Iterable[Sequence[int]]]
"""Gives the tokens of each text. It finds special tokens, and adds none."""
_REPLACES = re.compile(r"\bdef (?:apply|get)_chat_template\b|\b(?:apply|get)_chat_template *=[^=]")
_IMPORTS = re.compile(r"^[ \t]*from[ \t]+\.[ \t]*(?:import[ \t]+)?(\w+)", re.MULTILINE)
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages hold reasoning, the one that counts first."""


class MessageFormat:
    """The tokenizer and the chat template of one model. For any thread."""

    def __init__(
        self,
        tokenize: Tokenize,
        added: Mapping[int, AddedToken],
        templates: Mapping[str, str],
        names: Mapping[str, str],
        control: Iterable[str] = (),
        image_token: str = "",
        own: Callable[..., Any] | None = None,
    ) -> None:
        """Compile the templates, keyed by name; the one named `default` is for all that no other is for.

        `tokenize` is the tokenizer, and `added` are the tokens beside its vocabulary, by id.
        `names` are tokens that templates may name, such as `bos_token`. They are control tokens too, as are the
        tokenizer's special ones and those of `control`. `image_token` stands for an image; empty if there are none.
        `own` is the `apply_chat_template` of a tokenizer that replaces what transformers does with the templates.
        Raises TemplateError for a template that is no Jinja.
        """
        self._tokenize_all = tokenize
        self.image_token = image_token
        """Stands for an image in a rendered text; empty for a model of text alone."""
        self._names = dict(names)
        self._templates = _compiled(templates)
        self._own = own
        self.special_ids = [at for at, token in added.items() if token.special]
        special = {*names.values(), *control, *(added[at].content for at in self.special_ids)} - {""}
        self._added = special | {token.content for token in added.values()}
        control_pattern, self._longest_control = _any_of(special), max(map(len, special), default=0)
        begun = "|".join(map(re.escape, {token[:end] for token in special for end in range(1, len(token))}))
        self._any_control = re.compile(control_pattern)
        self._in_control = re.compile(f"(?={control_pattern}).", re.DOTALL)
        """The first character of each, also of one that begins in another."""
        self._in_begun = re.compile(f"(?=(?:{begun or '(?!)'})\\Z).", re.DOTALL)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation as a text. What others than the template and the model said is to be `broken`.

        The content of a message is a text, or a list of parts: {"type": "text", "text": ...} and {"type": "image"}.
        As in transformers, fields that are None are left out, and `tools` may be among the options.
        Raises one of `FAULTS`.
        """
        given = dict(options or {})
        tools = tools or given.pop("tools", None) or ()
        given |= {"tools": tools or None, "add_generation_prompt": add_generation_prompt}
        shaped = list(map(_with_reasoning, messages))
        if self._own is not None:
            return _text(self._own(shaped, tokenize=False, **given))
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        return template.render(
            **{"documents": None, **self._names, **given},
            messages=shaped,
            raise_exception=_refuse,
            strftime_now=lambda form: datetime.now().astimezone().replace(tzinfo=None).strftime(form),
        )

    def framing(self, options: Mapping[str, Any] | None = None) -> tuple[str, str]:
        """Return what the template puts before and behind an answer, found by rendering one. Raises one of `FAULTS`.

        The first is how the prompt begins an answer, such as "<think>" (mostly ""); the second the token that ends
        the turn, as text, which is empty if it is no token of its own.
        """
        question = [{"role": "user", "content": "question"}]
        answered = self.rendered([*question, {"role": "assistant", "content": ESCAPED}], (), options, False)
        head, _, tail = answered.partition(ESCAPED)
        prompt = self.rendered(question, (), options)
        prefill = prompt[len(head) :] if prompt.startswith(head) else ""
        return prefill, max((token for token in self._added if tail.startswith(token)), key=len, default="")

    def broken(self, said: Any) -> Any:
        """Return what others than the model said, or a part of it, with all control tokens broken up, also begun ones.

        Another text, which the template puts behind this one, may go on with what is begun.
        """
        if isinstance(said, str):
            plain = said.replace(BREAK, "").replace(ESCAPED, "")
            text = self._in_control.sub(_with_break, plain)
            tail = max(0, len(text) - self._longest_control)
            return text[:tail] + self._in_begun.sub(_with_break, text[tail:])
        if isinstance(said, Mapping):
            return {self.broken(key): self.broken(value) for key, value in said.items()}
        return [self.broken(part) for part in said] if isinstance(said, list | tuple) else said

    def segments(self, text: str) -> list[str]:
        """Return a rendered text before, between and behind its images."""
        return text.split(self.image_token) if self.image_token else [text]

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text. Special tokens are found unless they are broken up, and none are added.

        A text without control tokens that are broken up is tokenized in one: some tokenizers begin each with a space.
        """
        return list(chain.from_iterable(self._tokenize_all(self._divided(text))))

    def _divided(self, text: str) -> list[str]:
        """The text, cut at each `BREAK` without which a control token would be found there."""
        parts = text.split(BREAK)
        plain, divided, begin, at = "".join(parts), [], 0, 0
        for part in parts[:-1]:
            at += len(part)
            if self._is_inside_control(plain, at):
                divided.append(plain[begin:at])
                begin = at
        return [*divided, plain[begin:]]

    def _is_inside_control(self, plain: str, at: int) -> bool:
        """Whether a control token begins before this place of a text and ends behind it."""
        begin, end = max(0, at - self._longest_control + 1), at + self._longest_control - 1
        while (found := self._any_control.search(plain, begin, end)) is not None and found.start() < at:
            if found.end() > at:
                return True
            begin = found.start() + 1
        return False


def tokenizing(tokenizer: Tokenizer) -> Tokenize:
    """Return what a tokenizer of a `tokenizer.json` does. It no longer pads or truncates."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # A batch is tokenized without the interpreter's lock
    return lambda texts: [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def own_rendering(auto_map: Any, read: Callable[[str], str | None]) -> str | None:
    """Return the file of Python in which a model's own tokenizer replaces `apply_chat_template`; None if it does not.

    `auto_map` is that of `tokenizer_config.json`, and `read` returns the text of one of the model's files. A file that
    is not there counts, because nobody can tell what it replaces.
    """
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    named = [classes] if isinstance(classes, str) else filter(None, classes or ())
    waiting = [each.rpartition(".")[0] for each in named]
    for module in waiting:
        text = read(f"{module}.py")
        if text is None or _REPLACES.search(text):
            return f"{module}.py"
        waiting += {*_IMPORTS.findall(text)}.difference(waiting)
    return None


def _text(rendered: Any) -> str:
    if not isinstance(rendered, str):
        raise TypeError(f"the tokenizer's apply_chat_template returns no text but {type(rendered).__name__}")
    return rendered


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under the names that templates read, whichever it has."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_break(first: re.Match[str]) -> str:
    return first[0] + BREAK


def _any_of(texts: Iterable[str]) -> str:
    """The pattern of the longest of these texts. Where a thousand begin alike, that beginning is looked at once."""
    behind: dict[str, list[str]] = {}
    for text in sorted(texts):
        behind.setdefault(text[:1], []).append(text)
    ends = "?" if behind.pop("", None) else ""
    ways = []
    for alike in behind.values():
        same = "".join(
            one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alike[0], alike[-1], strict=False))
        )
        ways.append(re.escape(same) + (_any_of(text[len(same) :] for text in alike) if len(alike) > 1 else ""))
    return f"(?:{'|'.join(ways) or '(?!)'}){ends}"


class _Generation(Extension):
    """The block that marks what a model has said, for training: its content is rendered, in a scope of its own."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compiled(templates: Mapping[str, str]) -> dict[str, Template]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return {name: environment.from_string(text) for name, text in templates.items()}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for ours in (BREAK, ESCAPED) if ensure_ascii else ():
        text = text.replace(json.dumps(ours).strip('"'), ours)
    return text


def _refuse(message: str) -> None:
    raise TemplateError(message)
