"""An instant Tinker server: every operation is finished when it is asked for, and every log-probability is 0.

It shows what the SDK and HTTP cost by themselves: no server can be faster than this one.
Run it with: python -m benchmarks.stub PORT
"""

import sys
import uuid
from typing import Any

import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from tinsmith.server.body import LargeBodies
from tinsmith.wire.forward_backward import decode_stored, encode_output

_MAX_BODY_BYTES = 2**26


def create_stub() -> FastAPI:
    """The application."""
    app = FastAPI(openapi_url=None)
    bodies = LargeBodies()
    bodies.parser.start()
    results: dict[str, tuple[bytes, str]] = {}
    """Body and media type of each finished operation, by request id."""

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        asked = await bodies.read_parsed(request, _MAX_BODY_BYTES, None, "application/x-protobuf", decode_stored)
        outputs = [
            {"logprobs": np.zeros(datum.loss_fn_inputs["target_tokens"].shape, np.float32)} for datum in asked.data
        ]
        return finished(
            asked.model_id, asked.seq_id, encode_output(outputs, {"loss:sum": 0.0}), "application/x-protobuf"
        )

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        return finished(model_id, 0, orjson.dumps({"model_id": model_id, "type": "create_model"}), "application/json")

    @app.post("/api/v1/optim_step")
    async def optim_step(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        return finished(
            asked["model_id"], asked["seq_id"], orjson.dumps({"metrics": {"learning_rate": 0.0}}), "application/json"
        )

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        content, media_type = results[orjson.loads(await request.body())["request_id"]]
        return Response(content, media_type=media_type)

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> Response:
        data = {"arch": "stub", "model_name": "stub", "tokenizer_id": "stub"}
        model_id = orjson.loads(await request.body())["model_id"]
        return _json(
            {
                "type": "get_info",
                "model_id": model_id,
                "model_data": data,
                "is_lora": True,
                "lora_rank": 8,
                "model_name": "stub",
            }
        )

    @app.post("/api/v1/create_session")
    async def create_session() -> Response:
        return _json({"type": "create_session", "session_id": str(uuid.uuid4())})

    @app.post("/api/v1/client/config")
    async def client_config() -> Response:
        return _json({"proto_compress_fwdbwd": True, "fwdbwd_max_chunk_len": 1024})

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything_else() -> Response:
        return _json({"status": "accepted"})

    def finished(model_id: str, seq_id: int, content: bytes, media_type: str) -> Response:
        request_id = f"{model_id}/{seq_id}"
        results[request_id] = content, media_type
        return _json({"request_id": request_id, "model_id": model_id})

    return app


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(
        create_stub(), port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )
