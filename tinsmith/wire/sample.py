"""asample on the wire: the JSON request, checked without its base model, and the protobuf reply."""

import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, FailFast, Field, PlainValidator, model_validator

from tinsmith.config import RequestsConfig
from tinsmith.errors import NotBuiltError, UserError, translated
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, StrictModel, parse_json
from tinsmith.wire.prompt_scores import (
    MAX_TOPK,
    PromptAnswers,
    PromptQuestions,
    TensorBody,
    TopLogprobs,
    int64_array,
    parse_targets,
)
from tinsmith.wire.tensors import ExpertIndices

MAX_SAMPLES = 1024

MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 2**12
"""Characters of all stop strings together."""
MAX_STOP_IDS = 2**14

_OBJECTS_BESIDE_CHUNKS = 4
"""The body, its prompt, sampling_params and target_prompt_logprobs."""

_BASE64_PIECE = 2**20
"""Characters, a multiple of four, to decode at a time: meanwhile the interpreter's lock is held."""


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and strings that end a sequence before max_tokens; the token that ends it is part of it."""

    eos: bool
    """Whether end-of-sequence tokens end it; False only for `stop=[]`."""
    strings: tuple[str, ...]
    """It ends once its text contains one."""
    token_ids: tuple[int, ...]


def _read_stop(value: Any) -> StopRule:
    items = value if isinstance(value, list) else [] if value is None else [value]
    texts = all(isinstance(item, str) and item for item in items)
    if not texts and not (isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in items)):
        raise ValueError("send a text, a list of texts, or a list of token ids in [0, 2**31); no text may be empty")
    characters = sum(map(len, items)) if texts else 0
    if len(items) > (MAX_STOP_STRINGS if texts else MAX_STOP_IDS) or characters > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"send at most {MAX_STOP_STRINGS} texts, of at most {MAX_STOP_CHARACTERS} characters together, "
            f"or at most {MAX_STOP_IDS} token ids; these are {len(items)}"
            + (f" of {characters} characters" if texts else "")
        )
    return StopRule(value != [], *((tuple(items), ()) if texts else ((), tuple(items))))


def _check_top_k(value: int) -> int:
    if value == 0:
        raise ValueError("send -1 (all tokens) or at least 1")
    return value


@dataclass(frozen=True)
class SamplingParams:
    """Settings for choosing tokens, as the request names them; only those read from one are checked."""

    __pydantic_config__ = StrictModel.model_config

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None goes up to the context window."""
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    """0 chooses the most likely token."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Least share of the probability that the considered tokens have."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_top_k)] = -1
    """-1 considers all tokens."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    """None draws one."""
    stop: Annotated[StopRule, PlainValidator(_read_stop)] = StopRule(True, (), ())


@dataclass(frozen=True)
class Shaping:
    """Settings for choosing tokens that applications have and the SDK has not; the defaults change nothing.

    Penalties change the distribution, before `temperature`. The rest leaves tokens out, as top_k and top_p do.
    """

    __pydantic_config__ = StrictModel.model_config

    presence_penalty: FiniteFloat = 0.0
    """Subtracted from the logit of each token that the answer has already."""
    frequency_penalty: FiniteFloat = 0.0
    """Subtracted so many times as the answer has the token."""
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01)] = 1.0
    """Divides the logit of each token of prompt and answer if it is positive, and multiplies it if it is negative."""
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Least probability of a token, as a share of the likeliest one's."""
    grammar: str | None = None
    """Texts that the answer may be, as llguidance reads it in Lark's form (`chat/grammar.py`)."""
    scored: bool = True
    """Whether log-probabilities are told; else they may cover those tokens alone that could be drawn."""

    @property
    def penalizes(self) -> bool:
        """Whether it changes the distribution."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def changes(self) -> bool:
        """Whether it changes which tokens are drawn."""
        return self.penalizes or self.min_p > 0 or self.grammar is not None


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A decoded asample request."""

    sampling_session_id: str
    seq_id: int
    num_samples: int
    prompt: list[Chunk]
    params: SamplingParams
    questions: PromptQuestions
    topk_sample_logprobs: int = 0
    """Number of likeliest tokens to return at each sampled position."""
    record_stability_info: bool = False
    """Record the sample for the loss stable_reinforce."""
    rollout_expert_indices: bool = False
    """Return the experts that computed each token."""
    shaping: Shaping = Shaping()

    @property
    def only_scores(self) -> bool:
        """Whether it asks about its prompt, as compute_logprobs does: the token drawn behind it is no sample."""
        return bool(self.questions) and self.params.max_tokens == 1

    def most_tokens(self, prompt: int, context: int, name: str) -> int:
        """Most tokens to sample behind a prompt of `prompt` tokens.

        Raises UserError if the context of model `name` is too short.

        A prompt that fills it can be scored: nothing is computed from the one token that compute_logprobs asks for.
        """
        wanted = self.params.max_tokens
        most = max(1, context - prompt) if wanted is None else wanted
        if prompt + most > context and not (self.questions and most == 1 and prompt == context):
            raise UserError(
                f"prompt length plus max_tokens exceeds the context window of {name}: {prompt} + {most} > {context}"
            )
        return most


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of an answer, by one version of the weights."""

    version: str
    """A base model's name, a checkpoint's path, or the request id of a snapshot's save."""
    start: int
    end: int


@dataclass(frozen=True)
class SampledSequence:
    """One sampled continuation."""

    tokens: list[int]
    """Includes the token that ended it."""
    logprobs: list[float]
    """At the temperature of the request, as in `topk`."""
    stop_reason: Literal["stop", "length"]
    topk: TopLogprobs | None = None
    """Likeliest tokens of each position, if asked for."""
    versions: tuple[VersionSpan, ...] = ()
    """The weights of its tokens, in order; several if they were replaced meanwhile (`inflight`)."""


class _TextBody(StrictModel):
    type: Literal["encoded_text"]
    tokens: Annotated[list[int], FailFast()]


class _ImageBody(StrictModel):
    type: Literal["image"]
    data: str
    format: Literal["png", "jpeg"]
    expected_tokens: Annotated[int, Field(ge=1)] | None = None


class _DmelBody(StrictModel):
    type: Literal["dmel"]
    dmel: Any


class _AssetBody(StrictModel):
    type: Literal["image_asset_pointer"]
    location: str
    format: str
    expected_tokens: int | None = None


_ChunkBody = Annotated[_TextBody | _ImageBody | _DmelBody | _AssetBody, Field(discriminator="type")]


class _PromptBody(StrictModel):
    chunks: Annotated[list[_ChunkBody], FailFast()]


class _SampleBody(StrictModel):
    sampling_session_id: Id | None = None
    seq_id: CountFromZero | None = None
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: _PromptBody
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    base_model: str | None = None
    model_path: str | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None
    rollout_expert_indices: bool | None = None
    type: Literal["sample"] = "sample"

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.prompt_logprobs_last_n is not None and not self.prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n applies to prompt logprobs; set prompt_logprobs")
        if self.base_model is not None or self.model_path is not None:
            raise UserError("base_model and model_path are fixed by the sampling session; create one for other weights")
        return self

    def questions(self) -> PromptQuestions:
        return PromptQuestions(
            logprobs=bool(self.prompt_logprobs),
            topk=self.topk_prompt_logprobs,
            last_n=self.prompt_logprobs_last_n,
            targets=None if self.target_prompt_logprobs is None else parse_targets(self.target_prompt_logprobs),
            alternatives=self.prompt_alt_tokens_k,
        )


class _OwnBody(_SampleBody):
    """A body that the server itself has made for an application."""

    shaping: Shaping = Shaping()


def check_size(body: bytes, limits: RequestsConfig) -> None:
    """Raise UserError for a body that takes long to parse, by its commas and braces, those in texts included."""
    letters = np.frombuffer(body, dtype=np.uint8)
    values = int(np.count_nonzero(letters == ord(",")))
    if values > limits.max_sample_values:
        raise UserError(
            f"the body holds {values} values, max_sample_values allows {limits.max_sample_values}; "
            "send a shorter prompt"
        )
    objects = int(np.count_nonzero(letters == ord("{"))) - _OBJECTS_BESIDE_CHUNKS
    if objects > limits.max_prompt_chunks:
        raise UserError(
            f"the prompt holds at least {objects} chunks, max_prompt_chunks allows {limits.max_prompt_chunks}; "
            "join neighbouring texts"
        )


def parse_sample_request(body: bytes, is_own: bool = False) -> SampleRequest:
    """An asample body, with a `Shaping` only if the server made it (`is_own`).

    Raises UserError naming field and value, NotBuiltError for fields that are not built.
    """
    parsed = parse_json(_OwnBody if is_own else _SampleBody, body)
    if parsed.sampling_session_id is None or parsed.seq_id is None:
        raise UserError("sampling_session_id and seq_id are both needed")
    chunks = [_decode_chunk(index, chunk) for index, chunk in enumerate(parsed.prompt.chunks)]
    return SampleRequest(
        sampling_session_id=parsed.sampling_session_id,
        seq_id=parsed.seq_id,
        num_samples=parsed.num_samples,
        prompt=chunks,
        params=parsed.sampling_params,
        questions=parsed.questions(),
        topk_sample_logprobs=parsed.topk_sample_logprobs,
        record_stability_info=bool(parsed.record_stability_info),
        rollout_expert_indices=bool(parsed.rollout_expert_indices),
        shaping=parsed.shaping if isinstance(parsed, _OwnBody) else Shaping(),
    )


def _decode_chunk(index: int, chunk: _TextBody | _ImageBody | _DmelBody | _AssetBody) -> Chunk:
    if isinstance(chunk, _TextBody):
        return TextChunk(_decode_tokens(index, chunk.tokens))
    if not isinstance(chunk, _ImageBody):
        raise NotBuiltError(f"prompt.chunks.{index}: type={chunk.type!r} is not built yet; send encoded_text and image")
    with translated(ValueError, UserError, lambda error: f"prompt.chunks.{index}.data is not base64: {error}"):
        data = b"".join(_base64_pieces(chunk.data))
    return ImageChunk(hashlib.sha256(data).digest(), data, chunk.format, chunk.expected_tokens)


def _base64_pieces(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _BASE64_PIECE):
        piece = text[start : start + _BASE64_PIECE]
        if start + _BASE64_PIECE < len(text) and piece.endswith("="):
            raise ValueError("Excess data after padding")
        yield binascii.a2b_base64(piece, strict_mode=True)


def _decode_tokens(index: int, tokens: list[int]) -> NDArray[np.int32]:
    # The range is checked here and not by pydantic, which takes 2 ms longer for 30,000 tokens.
    wide = int64_array(f"prompt.chunks.{index}.tokens", tokens)
    if wide.size and (wide.min() < 0 or wide.max() >= 2**31):
        first = np.flatnonzero((wide < 0) | (wide >= 2**31))[0]
        raise UserError(
            f"prompt.chunks.{index}.tokens at position {first} is {wide[first]}; send token ids in [0, 2**31)"
        )
    return wide.astype(np.int32)


def encode_sample_response(
    sequences: Sequence[SampledSequence],
    answers: PromptAnswers,
    prompt_cache_hit_tokens: int,
    experts: Sequence[ExpertIndices | None] = (),
) -> bytes:
    """The protobuf SampleResponse; `experts` are those of each sequence, if they are asked for."""
    response = tinker_pb2.SampleResponse(prompt_cache_hit_tokens=prompt_cache_hit_tokens)
    for sequence in sequences:
        response.sequences.add(
            stop_reason=tinker_pb2.STOP_REASON_STOP
            if sequence.stop_reason == "stop"
            else tinker_pb2.STOP_REASON_LENGTH,
            tokens=np.array(sequence.tokens, dtype="<i4").tobytes(),
            logprobs=np.array(sequence.logprobs, dtype="<f4").tobytes(),
            topk_sampled_logprobs=None if sequence.topk is None else sequence.topk.encode(),
            versions=[
                tinker_pb2.VersionSpan(version=span.version, start=span.start, end=span.end)
                for span in sequence.versions
            ],
        )
    for index, chosen in enumerate(experts):
        if chosen is not None:
            sent = response.sequences[index]
            in_order = np.ascontiguousarray(chosen.swapaxes(0, 1)).astype(chosen.dtype.newbyteorder("<"))
            sent.rollout_expert_indices.data = in_order.tobytes()
            sent.rollout_expert_indices.shape.extend(in_order.shape)
    answers.encode_into(response)
    return response.SerializeToString()
