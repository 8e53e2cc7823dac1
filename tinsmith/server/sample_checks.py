"""What can be known to be wrong with a sample before the engine sees it, given the base model."""

from tinsmith.config import ImagesConfig
from tinsmith.engine.messages import ModelFacts
from tinsmith.errors import UserError
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.images import read_header
from tinsmith.wire.sample import SampleRequest


def check_sample(request: SampleRequest, facts: ModelFacts, limits: ImagesConfig) -> None:
    """Raise UserError for token ids outside the vocabulary, unusable images, an empty prompt, or more tokens than the model can take."""
    length = 0
    for index, chunk in enumerate(request.prompt):
        if isinstance(chunk, TextChunk):
            _check_tokens(index, chunk, facts)
            length += len(chunk.tokens)
        else:
            _check_image(index, chunk, facts, limits)
            length += chunk.expected_tokens or 1
    if length == 0:
        raise UserError("the prompt is empty; send at least one token")
    new_tokens = request.params.max_tokens or 1
    if length + new_tokens > facts.max_context:
        raise UserError(
            f"prompt length plus max_tokens exceeds the context window of {facts.name}: {length} + {new_tokens} > {facts.max_context}"
        )


def _check_tokens(index: int, chunk: TextChunk, facts: ModelFacts) -> None:
    if len(chunk.tokens) and chunk.tokens.max() >= facts.vocab_size:
        raise UserError(
            f"prompt.chunks.{index}.tokens holds {chunk.tokens.max()}; the vocabulary of {facts.name} ends at {facts.vocab_size - 1}"
        )


def _check_image(index: int, chunk: ImageChunk, facts: ModelFacts, limits: ImagesConfig) -> None:
    if not facts.takes_images:
        raise UserError(f"prompt.chunks.{index} is an image, but {facts.name} takes text only")
    assert chunk.data is not None, "images of a sample travel with it"
    try:
        read_header(chunk.data, chunk.format, limits)
    except UserError as error:
        raise UserError(f"prompt.chunks.{index}: {error}") from error
