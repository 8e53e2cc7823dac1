"""A model driven over plain HTTP: for orders and repeats that the SDK would not send."""

from collections.abc import Sequence

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from tests.acceptance.talking import datum, logprobs, text_input

GOOD = [datum(text_input(0, 12), 0)]


class RawModel:
    """One model. Every submit names its seq_id; `result` waits for a request id."""

    def __init__(
        self, http: httpx.Client, base_model: str, rank: int = 8, seed: int = 3, path: str | None = None
    ) -> None:
        """A new one, or with `path` one that goes on from that checkpoint."""
        self.http = http
        session_id = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model}
        if path is None:
            created = http.post("create_model", json=body | {"lora_config": {"rank": rank, "seed": seed}}).json()
        else:
            created = http.post("load_weights", json=body | {"path": path, "optimizer": True}).json()
        self.model_id: str = created["model_id"]
        assert self.result(created["request_id"])["model_id"] == self.model_id

    def forward_backward(self, seq_id: int, data: Sequence[types.Datum], forward_only: bool = False) -> str:
        body = types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=body, model_id=self.model_id, seq_id=seq_id)
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        return self.submit_protobuf(message.SerializeToString())

    def submit_protobuf(self, body: bytes) -> str:
        """Submit a forward_backward that names its model and seq_id; returns the request id."""
        return self._id_of(
            self.http.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})
        )

    def submit(self, kind: str, seq_id: int, **body: object) -> str:
        return self._id_of(self.http.post(kind, json={"model_id": self.model_id, "seq_id": seq_id} | body))

    def _id_of(self, reply: httpx.Response) -> str:
        assert reply.status_code == 200, reply.text
        request_id: str = reply.json()["request_id"]
        return request_id

    def optim_step(self, seq_id: int, params: types.AdamParams) -> str:
        return self.submit("optim_step", seq_id, adam_params=params.model_dump())

    def save(self, seq_id: int, name: str) -> str:
        return self.submit("save_weights", seq_id, path=name)

    def _ended(self, request_id: str) -> httpx.Response:
        while (reply := self.http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        return reply

    def result(self, request_id: str) -> dict[str, object]:
        """The JSON result or error of an operation."""
        reply = self._ended(request_id)
        assert reply.status_code == 200, reply.text
        result: dict[str, object] = reply.json()
        return result

    def output(self, request_id: str) -> types.ForwardBackwardOutput:
        """The result of a forward or forward_backward."""
        reply = self._ended(request_id)
        assert reply.headers["content-type"] == "application/x-protobuf", reply.text
        return deserialize_forward_backward_output(reply.content)

    def scores(self, seq_id: int, data: Sequence[types.Datum] = GOOD) -> list[list[float]]:
        """Log-probabilities of good data with the weights as they are."""
        found = self.output(self.forward_backward(seq_id, data, forward_only=True))
        return [scores.tolist() for scores in logprobs(found)]

    def grad_norm(self, request_id: str) -> float:
        """The gradient norm that an optim_step reported."""
        metrics = self.result(request_id)["metrics"]
        assert isinstance(metrics, dict)
        return float(metrics["grad_norm"])
