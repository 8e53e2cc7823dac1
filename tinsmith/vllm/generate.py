"""One generate request to one vLLM server. A picture's pixel values travel until the server has answered once about it."""

from typing import Any

from tinsmith.rendering.rendered import RenderedInput
from tinsmith.vllm.connection import ServerFailedError
from tinsmith.vllm.features import features_of
from tinsmith.vllm.older import modern
from tinsmith.vllm.servers import Life


async def generate(
    life: Life, rendered: RenderedInput, params: dict[str, Any], model: str | None, answer: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The reply to a prompt, followed by `answer`. Raises as `Connection.post`.

    The server may have forgotten a picture that it has seen, which it answers with an error: then it is sent again.
    """
    known = {picture.sha256.hex() for picture in rendered.pictures} & set(life.pictures)
    body: dict[str, Any] = {
        "token_ids": [*rendered.token_ids.tolist(), *answer],
        "sampling_params": params,
        "model": model,
        "features": features_of(rendered, known),
    }
    async with life.slots:
        try:
            reply: dict[str, Any] = await life.connection.post("/inference/v1/generate", body)
        except ServerFailedError:
            if not known:
                raise
            reply = await life.connection.post("/inference/v1/generate", body | {"features": features_of(rendered, ())})
    for picture in rendered.pictures:
        if picture.pixel_values.nbytes <= life.pictures.maxsize:
            life.pictures[picture.sha256.hex()] = picture.pixel_values.nbytes
    return modern(reply)
