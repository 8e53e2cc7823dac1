"""Data of the pages on samples: a list of the newest, and one of them token by token."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from tinsmith.chat.template import ChatFormat
from tinsmith.chat.text import TextStream
from tinsmith.console.pages import short
from tinsmith.console.texts import end_of, shade_of_surprise
from tinsmith.errors import NotFoundError, UserError, quoted
from tinsmith.store import ids
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.paths import is_path, parse_path
from tinsmith.wire.sample import SampleRequest, parse_sample_request

Json = dict[str, Any]

MOST_LISTED = 500
"""The newest samples that are searched and sorted."""
MOST_LISTED_BYTES = 2**24
"""Their size together: with several HTTP servers they travel from one process to another."""
_MOST_ROWS = 100
_BYTES_BESIDE = 1024
"""Bytes of a kept sample beside its body and its reply."""
_EXCERPT = 240
_MOST_TOKENS = 6000
"""Tokens of a prompt, and of all answers together, that a page shows."""
_EXCERPT_TOKENS = 1000
"""Tokens whose text is more than an excerpt."""
_EXCERPT_TEXTS = 8
"""Texts of a prompt, between its images, of which an excerpt is taken."""


@dataclass(frozen=True)
class KeptSample:
    """A finished sample as a server keeps it for a while."""

    request_id: str
    tenant: str
    base_model: str
    weights_id: str | None
    """The identity of the weights; None for those of the base model."""
    began_at: float
    """Unix time."""
    seconds: float
    body: bytes
    """The request."""
    reply: bytes
    """The result; empty if it has failed."""
    error: str = ""
    category: str = ""
    """Whose fault an error is: user or server."""

    @property
    def url(self) -> str:
        """Path of its page, as long as it is kept."""
        owner, _, number = self.request_id.rpartition("/")
        return f"/samples/{quote(owner, safe=':')}/{number}"

    @property
    def ended_at(self) -> float:
        """Unix time."""
        return self.began_at + self.seconds

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        return len(self.body) + len(self.reply) + _BYTES_BESIDE


Formats = Mapping[str, ChatFormat]
"""Tokenizers by the name of the base model; a sample of another one has no text."""


def samples_page(kept: Sequence[KeptSample], formats: Formats, asked: Mapping[str, str], keeps_mib: int) -> Json:
    """The newest samples, searched and sorted. Takes long where there are many: not for an event loop."""
    sort = asked.get("sort") or "newest"
    if sort.lstrip("-") not in _SORTS:
        raise UserError(
            f"sort={quoted(sort)}: sort by one of {', '.join(_SORTS)}, with - in front for the smallest first"
        )
    chosen = [each for each in kept if not asked.get("model") or _weights(each) == asked["model"]]
    wanted = asked.get("q", "").casefold()
    rows = [_row(each, formats.get(each.base_model), whole=bool(wanted)) for each in chosen]
    if wanted:
        rows = [row for row in rows if any(wanted in row[name].casefold() for name in ("whole", "error"))]
    rows.sort(key=_SORTS[sort.lstrip("-")], reverse=not sort.startswith("-"))
    for row in rows:
        del row["whole"]
    return {
        "samples": rows[:_MOST_ROWS],
        "count": len(rows),
        "searched": len(kept),
        "most_rows": _MOST_ROWS,
        "most_searched": MOST_LISTED,
        "most_mib": MOST_LISTED_BYTES // 2**20,
        "keeps_mib": keeps_mib,
        "q": asked.get("q", ""),
        "model": asked.get("model", ""),
        "models": {name: label_of(name) for name in sorted({_weights(each) for each in kept})},
        "sort": sort,
        "sorts": {name: _sorted_url(name, sort, asked) for name in _SORTS},
    }


_SORTS: dict[str, Callable[[Json], Any]] = {
    "newest": lambda row: row["began_at"],
    "tokens": lambda row: row["tokens"],
    "logprob": lambda row: -math.inf if row["logprob"] is None else row["logprob"],
    "seconds": lambda row: row["seconds"],
}


def _sorted_url(name: str, sort: str, asked: Mapping[str, str]) -> str:
    kept = {key: asked[key] for key in ("q", "model") if asked.get(key)}
    return "?" + urlencode({"sort": f"-{name}" if name == sort else name, **kept})


def _weights(sample: KeptSample) -> str:
    return sample.weights_id or sample.base_model


def label_of(weights: str) -> str:
    """A short name for weights: of a checkpoint, a run's newest or a snapshot of one, or a base model."""
    if is_path(weights):
        path = parse_path(weights)
        return f"{path.name} of {short(path.model_id)}"
    run, _, number = weights.removeprefix("live:").rpartition("/")
    if weights.startswith("live:"):
        return f"{short(number)}, newest"
    return f"{short(run)} at {number}" if ids.parse_request_id(weights) and ids.session_of(run) else weights


def _about(sample: KeptSample) -> Json:
    return {
        "request_id": sample.request_id,
        "url": sample.url,
        "tenant": sample.tenant,
        "base_model": sample.base_model,
        "weights": _weights(sample),
        "label": label_of(_weights(sample)),
        "chat": _chat(sample),
        "began_at": sample.began_at,
        "seconds": sample.seconds,
        "error": sample.error,
    }


def _chat(sample: KeptSample) -> str:
    """A link to a chat with the same weights, or with the newest of the same training run."""
    name = _weights(sample)
    if sample.weights_id is not None and not name.startswith("tinker://"):
        name = f"live:{name.partition('/')[0]}"
    return f"/playground?{urlencode({'model': name})}"


def _row(sample: KeptSample, model: ChatFormat | None, whole: bool) -> Json:
    """With all text of the sample as `whole`, or an excerpt of it, which takes a tenth of the time."""
    request, reply = parse_sample_request(sample.body, is_own=True), tinker_pb2.SampleResponse.FromString(sample.reply)
    logprobs = [np.frombuffer(sequence.logprobs, "<f4") for sequence in reply.sequences]
    count = sum(map(len, logprobs))
    texts = [
        _decoded(model, np.frombuffer(sequence.tokens, "<i4")[: None if whole else _EXCERPT_TOKENS].tolist())
        for sequence in (reply.sequences if whole else reply.sequences[:1])
    ]
    prompt = _prompt_text(request, model, whole)
    first = texts[0] if texts else ""
    return {
        **_about(sample),
        "prompt": end_of(prompt),
        "answer": first if len(first) <= _EXCERPT else first[:_EXCERPT] + "…",
        "whole": "\n".join([prompt, *texts]),
        "answers": len(reply.sequences),
        "images": [_image_url(sample, at) for at in range(_image_count(request))][:3],
        "tokens": count,
        "logprob": float(sum(each.sum() for each in logprobs) / count) if count else None,
    }


def _decoded(model: ChatFormat | None, tokens: Sequence[int]) -> str:
    if model is None:
        return " ".join(map(str, tokens))
    return str(model.tokenizer.decode(tokens, skip_special_tokens=False))


def _prompt_text(request: SampleRequest, model: ChatFormat | None, whole: bool) -> str:
    texts = [chunk.tokens for chunk in request.prompt if isinstance(chunk, TextChunk)]
    shown = texts if whole else [tokens[-_EXCERPT_TOKENS:] for tokens in texts[-_EXCERPT_TEXTS:]]
    return " ".join(_decoded(model, tokens.tolist()) for tokens in shown)


def _image_count(request: SampleRequest) -> int:
    return sum(isinstance(chunk, ImageChunk) for chunk in request.prompt)


def _image_url(sample: KeptSample, number: int) -> str:
    owner, _, last = sample.request_id.rpartition("/")
    return f"/sample-images/{quote(owner, safe=':')}/{last}/{number}"


def image_of(sample: KeptSample, number: str) -> tuple[bytes, str]:
    """The bytes and the format of an image of a prompt. Raises NotFoundError."""
    images = [chunk for chunk in parse_sample_request(sample.body, is_own=True).prompt if isinstance(chunk, ImageChunk)]
    at = int(number) if number.isdecimal() and len(number) < 6 else len(images)
    if at >= len(images):
        raise NotFoundError(f"sample {sample.request_id} has {len(images)} images, and no image {quoted(number)}")
    data = images[at].data
    assert data is not None, "images of a sample travel with it"
    return data, images[at].format


# ---- One sample


def sample_page(sample: KeptSample, model: ChatFormat | None) -> Json:
    """One sample: its prompt with pictures, and its answers token by token."""
    request, reply = parse_sample_request(sample.body, is_own=True), tinker_pb2.SampleResponse.FromString(sample.reply)
    params = request.params
    settings = {
        "temperature": params.temperature,
        "top_p": None if params.top_p == 1 else params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "stop": ", ".join(map(repr, params.stop.strings)) or ", ".join(map(str, params.stop.token_ids)),
    }
    return {
        **_about(sample),
        "settings": {name: value for name, value in settings.items() if value not in (None, "", -1)},
        "prompt": list(_prompt(sample, request, model)),
        "prompt_tokens": sum(len(chunk.tokens) for chunk in request.prompt if isinstance(chunk, TextChunk)),
        "cached_tokens": reply.prompt_cache_hit_tokens,
        "answers": [_answer(each, model, _MOST_TOKENS // len(reply.sequences)) for each in reply.sequences],
    }


def _prompt(sample: KeptSample, request: SampleRequest, model: ChatFormat | None) -> Sequence[Json]:
    pieces, images = list[Json](), 0
    for chunk in request.prompt:
        if isinstance(chunk, TextChunk):
            shown = _decoded(model, chunk.tokens[-_MOST_TOKENS:].tolist())
            pieces.append({"text": ("… " if len(chunk.tokens) > _MOST_TOKENS else "") + shown})
        else:
            pieces.append({"image": _image_url(sample, images)})
            images += 1
    return pieces


def _answer(sequence: tinker_pb2.SampledSequence, model: ChatFormat | None, most: int) -> Json:
    tokens = np.frombuffer(sequence.tokens, "<i4")
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    top, shown = sequence.topk_sampled_logprobs, min(len(tokens), most)
    others = np.frombuffer(top.token_ids, "<i4").reshape(-1, top.k) if top.k else None
    scores = np.frombuffer(top.logprobs, "<f4").reshape(-1, top.k) if top.k else None
    spans = []
    for at, (text, token, logprob) in enumerate(
        zip(_pieces(model, tokens[:shown].tolist()), tokens[:shown].tolist(), logprobs[:shown].tolist(), strict=True)
    ):
        about = f"token {token} · {math.exp(min(logprob, 0.0)):.1%} ({logprob:.3f})"
        if others is not None and scores is not None:
            about += "".join(
                f"\n{math.exp(min(score, 0.0)):.1%} {_decoded(model, [other])}"
                for other, score in zip(others[at].tolist(), scores[at].tolist(), strict=True)
            )
        spans.append({"text": text, "shade": shade_of_surprise(logprob), "about": about})
    return {
        "spans": spans,
        "left_out": len(tokens) - shown,
        "tokens": len(tokens),
        "logprob": float(logprobs.mean()) if len(logprobs) else None,
        "ended": "stop" if sequence.stop_reason == tinker_pb2.STOP_REASON_STOP else "length",
        "versions": [span.version for span in sequence.versions],
    }


def _pieces(model: ChatFormat | None, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character of several is at the last of them."""
    if model is None:
        return [f"{token} " for token in tokens]
    stream = TextStream(model.tokenizer)
    pieces = [stream.add(token) for token in tokens]
    if pieces:
        pieces[-1] += stream.rest()
    return pieces
