"""Checks a sample before the engine sees it: its body alone, then against its base model."""

import hashlib
from dataclasses import dataclass, replace

from tinsmith.config import ImagesConfig, RequestsConfig
from tinsmith.errors import UserError
from tinsmith.protocol.facts import ModelFacts
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.images import ImageHeader, check_pixels, read_header
from tinsmith.wire.prompt_scores import MAX_CELLS
from tinsmith.wire.sample import SampleRequest, check_size, parse_sample_request


@dataclass(frozen=True, eq=False)
class ReceivedSample:
    """An asample body as it came in."""

    request: SampleRequest
    """Its images have no bytes: the engine gets `body`."""
    headers: list[ImageHeader | UserError]
    """The size of each image in order, or what is wrong with it."""
    body: bytes
    digest: bytes


def receive_sample(body: bytes, limits: RequestsConfig, images: ImagesConfig, is_own: bool = False) -> ReceivedSample:
    """Parse a body and the headers of its images, as `parse_sample_request` does.

    Raises UserError for what no base model takes, and NotBuiltError.
    """
    check_size(body, limits)
    request = parse_sample_request(body, is_own)
    headers = [_header(chunk, images) for chunk in request.prompt if isinstance(chunk, ImageChunk)]
    if len(headers) > limits.max_images:
        raise UserError(f"the prompt holds {len(headers)} images, max_images allows {limits.max_images}; send fewer")
    prompt = [replace(chunk, data=None) if isinstance(chunk, ImageChunk) else chunk for chunk in request.prompt]
    return ReceivedSample(replace(request, prompt=prompt), headers, body, hashlib.sha256(body).digest())


def _header(chunk: ImageChunk, limits: ImagesConfig) -> ImageHeader | UserError:
    assert chunk.data is not None, "images of a sample travel with it"
    try:
        return read_header(chunk.data, chunk.format, limits)
    except UserError as error:
        return error


def check_sample(received: ReceivedSample, facts: ModelFacts, limits: ImagesConfig) -> int:
    """The most tokens that a sample of this base model may compute, as far as is known before its prompt is rendered.

    Raises UserError for what is known to be wrong.
    """
    request, headers = received.request, iter(received.headers)
    length, known, pixels = 0, True, dict[bytes, int]()
    for index, chunk in enumerate(request.prompt):
        if isinstance(chunk, TextChunk):
            _check_tokens(index, chunk, facts)
            length += len(chunk.tokens)
        else:
            header = _checked(index, next(headers), facts)
            pixels[chunk.sha256] = header.width * header.height
            length += chunk.expected_tokens or 1
            known &= chunk.expected_tokens is not None
    check_pixels(sum(pixels.values()), limits)
    if length == 0:
        raise UserError("the prompt is empty; send at least one token")
    new_tokens = request.most_tokens(length, facts.max_context, facts.name)
    if known:  # else the engine knows the length of the prompt
        request.questions.check(length, facts.vocab_size)
    _check_topk(request, new_tokens, facts)
    return length + request.num_samples * new_tokens


def _check_topk(request: SampleRequest, new_tokens: int, facts: ModelFacts) -> None:
    k = request.topk_sample_logprobs
    if k > facts.vocab_size:
        raise UserError(f"topk_sample_logprobs is {k}; the vocabulary of {facts.name} has {facts.vocab_size} tokens")
    if k * request.num_samples * new_tokens > MAX_CELLS:
        raise UserError(
            f"topk_sample_logprobs={k} for {request.num_samples} samples of up to {new_tokens} tokens is more than "
            f"{MAX_CELLS} numbers; "
            "ask for fewer"
        )


def _check_tokens(index: int, chunk: TextChunk, facts: ModelFacts) -> None:
    if len(chunk.tokens) and chunk.tokens.max() >= facts.vocab_size:
        first = (chunk.tokens >= facts.vocab_size).argmax()
        raise UserError(
            f"prompt.chunks.{index}.tokens at position {first} is {chunk.tokens[first]}; "
            f"the vocabulary of {facts.name} ends at {facts.vocab_size - 1}"
        )


def _checked(index: int, header: ImageHeader | UserError, facts: ModelFacts) -> ImageHeader:
    if not facts.takes_images:
        raise UserError(f"prompt.chunks.{index} is an image, but {facts.name} takes text only")
    if isinstance(header, UserError):
        raise UserError(f"prompt.chunks.{index}: {header}")
    return header
