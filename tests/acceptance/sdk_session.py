"""What a user does with the SDK, in the words that all versions from the oldest on understand.

Prints what came out as JSON.

Run as a program with the server's address, by whatever `tinker` is found first.
"""

import json
import sys
from typing import Any

import tinker
import torch
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3])
TARGETS = [2, 3, 4, 5]
STEP = types.AdamParams(learning_rate=1e-2)


def datum(**inputs: list[float]) -> types.Datum:
    """Four tokens and their targets."""
    tensors = {name: types.TensorData(data=values, dtype="float32", shape=[4]) for name, values in inputs.items()}
    targets = types.TensorData(data=TARGETS, dtype="int64", shape=[4])
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def ready(client: Any) -> Any:
    """A client, of which newer versions return a future."""
    return client.result() if hasattr(client, "result") else client


def run(url: str) -> dict[str, Any]:
    """Train with two losses and a custom one, sample a snapshot and a checkpoint, go on from a checkpoint, list it."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-sdk")
    client = ready(service.create_lora_training_client(base_model="text", rank=8, seed=3))
    plain, policy = datum(weights=[1.0] * 4), datum(logprobs=[-7.0] * 4, advantages=[1.0] * 4)
    losses = [
        step(client, item, loss_fn)
        for item, loss_fn in ((plain, "cross_entropy"), (policy, "ppo"), (plain, "cross_entropy"))
    ]
    client.forward_backward_custom([plain], lambda _, logprobs: (torch.cat(list(logprobs)).square().sum(), {})).result()
    client.optim_step(STEP).result()

    sampler = ready(client.save_weights_and_get_sampling_client())
    saved = client.save_weights_for_sampler("sdk").result().path
    samples = [greedy(sampler), greedy(ready(service.create_sampling_client(model_path=saved)))]
    resumed = ready(service.create_training_client_from_state(client.save_state("sdk").result().path))
    listed = service.create_rest_client().list_checkpoints(client.model_id).result().checkpoints
    outcome = {
        "version": tinker.__version__,
        "losses": losses,
        "samples": samples,
        "scores": [score(trained, plain) for trained in (client, resumed)],
        "prompt": sampler.compute_logprobs(PROMPT).result()[1:],
        "checkpoints": sorted(checkpoint.checkpoint_id for checkpoint in listed),
    }
    # The HTTP library of newer versions aborts a Python 3.11 that ends while an answer comes in. The oldest has no
    # `close`, and never did.
    if hasattr(service, "close"):
        service.close("success").result()
    return outcome


def step(client: Any, item: types.Datum, loss_fn: str) -> float:
    passed, stepped = client.forward_backward([item], loss_fn), client.optim_step(STEP)
    loss: float = passed.result().metrics["loss:sum"]
    stepped.result()
    return loss


def greedy(sampler: Any) -> list[int]:
    tokens: list[int] = (
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=5, temperature=0.0)).result().sequences[0].tokens
    )
    return tokens


def score(client: Any, item: types.Datum) -> list[float]:
    output = client.forward([item], "cross_entropy").result().loss_fn_outputs[0]
    return [float(value) for value in output["logprobs"].data]


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
