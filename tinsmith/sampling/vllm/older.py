"""Replies of vLLM 0.26, the newest for PyTorch 2.11, in the form that the rest of this room knows from 0.32.

It does not say which weights or which adapter it computed with: that the weights have arrived, and the canary, are the checks there.
"""

from typing import Any

from tinsmith.sampling.vllm.connection import ServerFailedError

_TOKEN_ID = "token_id:"


def modern(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply of the generate endpoint. One of 0.32 is returned as it is.

    Raises ServerFailedError where 0.32 answers 500, for a picture that it has forgotten, say.
    """
    if any(choice["finish_reason"] == "error" for choice in reply["choices"]):
        raise ServerFailedError("vLLM could not compute a request; its log says why")
    reply.setdefault("model", None)
    for choice in reply["choices"]:
        if "weight_versions" not in choice:
            choice["weight_versions"] = None
            for entry in (choice["logprobs"] or {"content": []})["content"]:
                _name(entry)
                for other in entry["top_logprobs"]:
                    _name(other)
    return reply


def _name(entry: dict[str, Any]) -> None:
    entry["token_id"] = int(entry["token"].removeprefix(_TOKEN_ID))
